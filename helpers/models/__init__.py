"""Models as joint distributions, and their log densities with gradients of their own.

What models share: a log density that brings its gradient along, and the check that a joint
distribution may hold `Sharded` parts.
"""

from collections.abc import Callable
from typing import Any

import jax

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
    """Refuses a plain TFP joint distribution with `Sharded` parts.

    Its log density is right under `pmap`. Its gradients are not, without a sign of it: each device
    gets those of its own share of the data.

    Args:
      model: A TFP distribution; only joint ones can be refused. A joint distribution nested in
        another is not looked into.

    Raises:
      TypeError: The model is a plain `tfd.JointDistribution...` with a `Sharded` part.
    """
    from tensorflow_probability.substrates import jax as tfp

    safe = tfp.experimental.distribute.JointDistributionDistributedMixin
    plain = isinstance(model, tfp.distributions.JointDistribution) and not isinstance(model, safe)
    if plain and _has_sharded_parts(model):
        raise TypeError(
            f"{type(model).__name__} from tfp.distributions has Sharded parts: its gradients under "
            "pmap are silently those of one device's data; use "
            "tfp.experimental.distribute.JointDistributionCoroutine (or ...Sequential, ...Named)"
        )


def _has_sharded_parts(model: Any) -> bool:
    try:
        names = model.experimental_shard_axis_names
    except NameError as error:
        # To list its parts the model draws from them, and a Sharded part asks for its axis.
        if "unbound axis name" in str(error):
            return True
        raise
    return bool(jax.tree_util.tree_leaves(names))
