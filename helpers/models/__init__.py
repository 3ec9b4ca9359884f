"""Models as joint distributions, and their log densities with gradients of their own.

What models share: a log density that brings its gradient along, and the check that a joint
distribution may hold `Sharded` parts.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Array = jax.Array


def with_gradient(
    value_and_gradient: Callable[..., tuple[Array, tuple[Array, ...]]],
    value: Callable[..., Array] | None = None,
) -> Callable[..., Array]:
    """Makes a log density of a function that computes value and gradient in one pass.

    Reverse-mode differentiation then returns that gradient and traces nothing. Collectives belong
    inside `value_and_gradient`: where parameters are replicated, each device must return the value
    and the gradient of the total, and `jax.value_and_grad` under `pmap` hands these on.

    Args:
      value_and_gradient: From parameters `[..., *event]` to the value `[...]` and a tuple of
        gradients, one a parameter and of its shape. Leading axes are chains: one chain's value
        depends on this chain's parameters only.
      value: Only the value, where it is cheaper; `value_and_gradient`'s if None.

    Returns:
      The log density, a function of the same parameters. It supports `jit`, `vmap`, `pmap` and
      reverse mode, not forward mode.
    """

    @jax.custom_vjp
    def log_density(*parameters):
        return value(*parameters) if value else value_and_gradient(*parameters)[0]

    def backward(gradients, cotangent):
        return tuple(
            cotangent.reshape(cotangent.shape + (1,) * (gradient.ndim - cotangent.ndim)) * gradient
            for gradient in gradients
        )

    log_density.defvjp(value_and_gradient, backward)
    return log_density


def check_sharded_model(model: Any) -> None:
    """Refuses TFP joint distributions whose gradients under `pmap` are wrong without a sign of it.

    The log density is right in all of them. A plain joint distribution of `Sharded` and replicated
    parts gives each device the gradients of its own share of the data. A nested one of both kinds,
    plain or not, can be wrong as well: what its replicated parts take from the joint distribution
    around it counts once a device. Where they take nothing the gradients are right, but this cannot
    be seen from outside. Parts that are all replicated, or all `Sharded` over the same axes, may be
    plain and nested.

    Args:
      model: A TFP distribution; only joint ones can be refused. It is traced, not computed, and
        need not be inside of its axes.

    Raises:
      TypeError: The model, or a joint distribution in it, is one of these.
    """
    _trace_with_axes(lambda: _check_joint(model, nested=False))


def _check_joint(model: Any, *, nested: bool) -> None:
    from tensorflow_probability.substrates import jax as tfp

    distributed = tfp.experimental.distribute.JointDistributionDistributedMixin
    if not isinstance(model, tfp.distributions.JointDistribution):
        return
    mixed = len(_shard_axes(model)) > 1
    if mixed and not isinstance(model, distributed):
        raise TypeError(
            f"{type(model).__name__} from tfp.distributions has Sharded parts: its gradients under "
            "pmap are silently those of one device's data; use "
            "tfp.experimental.distribute.JointDistributionCoroutine (or ...Sequential, ...Named)"
        )
    if mixed and nested:
        raise TypeError(
            f"{type(model).__name__} inside of another joint distribution has both Sharded and "
            "replicated parts: under pmap, gradients through the replicated ones may count once a "
            "device; make them parts of the outer joint distribution"
        )
    for part in _parts(model):
        _check_joint(part, nested=True)


def _shard_axes(model: Any) -> set[frozenset]:
    """The sets of axes over which parts are sharded, those of nested joint distributions too."""
    from tensorflow_probability.substrates import jax as tfp

    if isinstance(model, tfp.distributions.JointDistribution):
        return set().union(*map(_shard_axes, _parts(model)))
    return {frozenset(jax.tree_util.tree_leaves(model.experimental_shard_axis_names))}


def _parts(model: Any) -> list:
    from tensorflow_probability.substrates import jax as tfp

    # Of a copy, because a model keeps the distributions of its first sample: here, tracers.
    parts, _ = model.copy().sample_distributions(seed=jax.random.PRNGKey(0))
    return jax.tree_util.tree_leaves(
        parts, is_leaf=lambda part: isinstance(part, tfp.distributions.Distribution)
    )


def _trace_with_axes(function: Callable[[], None], names: tuple[str, ...] = ()) -> None:
    """Traces a function; axes that it names and that are not bound here get the size 1."""

    def traced(x):
        function()
        return x

    for name in names:
        traced = jax.vmap(traced, axis_name=name)
    try:
        jax.eval_shape(traced, np.zeros((1,) * len(names)))
    except NameError as error:
        unbound = re.search(r"unbound axis name: (\w+)", str(error))
        if unbound is None or unbound[1] in names:
            raise
        _trace_with_axes(function, (*names, unbound[1]))
