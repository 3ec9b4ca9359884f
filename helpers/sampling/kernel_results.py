"""What a TFP kernel already knows after a step, read from its results without evaluating anything.

Kernels are nested (step size adaptation around Metropolis-Hastings around leapfrog steps), and so
are their results. Some settings are in the results only where something adapts them, else in the
kernel's parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
from tensorflow_probability.substrates.jax.internal import unnest

# An energy error above it is a divergence, as in Stan and as in TFP's NUTS.
DIVERGENCE_THRESHOLD = 1000.0


def standard_trace(kernel: Any, results: Any) -> dict[str, jax.Array]:
    """Reads the quantities that every run records.

    Args:
      kernel: TFP transition kernel.
      results: Its results after a step.

    Returns:
      Those that the kernel has of: `log_density` `[num_chains...]`; `acceptance`, the probability
      with which the proposal was accepted, `[num_chains...]`; `is_accepted`, bool
      `[num_chains...]`; `diverging`, bool `[num_chains...]`; `step_size`, a scalar or
      `[num_chains...]` or what else the kernel was given, a tuple if it was given several;
      `num_leapfrogs`, int32, a scalar or `[num_chains...]`.
    """
    trace = {}
    log_density = _from_results(results, "target_log_prob")
    if log_density is not None:
        trace["log_density"] = log_density
    log_accept_ratio = _from_results(results, "log_accept_ratio")
    if log_accept_ratio is not None:
        trace["acceptance"] = jnp.exp(jnp.minimum(log_accept_ratio, 0.0))
        diverging = _from_results(results, "has_divergence")
        if diverging is None:
            # The log acceptance ratio of HMC is the negative energy error. Not a number diverges.
            diverging = ~(log_accept_ratio >= -DIVERGENCE_THRESHOLD)
        trace["diverging"] = diverging
    is_accepted = _from_results(results, "is_accepted")
    if is_accepted is not None:
        trace["is_accepted"] = is_accepted
    step_size = _setting(kernel, results, "step_size")
    if step_size is not None:
        rank = 0 if log_density is None else jnp.ndim(log_density)
        parts = tuple(_drop_unit_axes(part, rank) for part in jax.tree_util.tree_leaves(step_size))
        trace["step_size"] = parts[0] if len(parts) == 1 else parts
    num_leapfrogs = _from_results(results, "leapfrogs_taken")
    if num_leapfrogs is None:
        num_leapfrogs = _setting(kernel, results, "num_leapfrog_steps")
    if num_leapfrogs is not None:
        trace["num_leapfrogs"] = jnp.asarray(num_leapfrogs, jnp.int32)
    return trace


def num_adaptation_steps(kernel: Any) -> jax.Array | None:
    """Finds for how many steps a kernel adapts.

    Args:
      kernel: TFP transition kernel.

    Returns:
      int32 scalar, the largest among the nested kernels, or None if nothing adapts.
    """
    counts = [
        jnp.max(jnp.asarray(parameters["num_adaptation_steps"], jnp.int32))
        for parameters in _nested_parameters(kernel)
        if parameters.get("num_adaptation_steps") is not None
    ]
    return jnp.max(jnp.stack(counts)) if counts else None


def _nested_parameters(kernel: Any) -> list[dict[str, Any]]:
    found = []
    while kernel is not None:
        parameters = getattr(kernel, "parameters", {})
        found.append(parameters)
        kernel = parameters.get("inner_kernel")
    return found


def _from_results(results: Any, name: str) -> Any:
    value = unnest.get_innermost(results, name, default=None)
    # TFP writes an empty list where a kernel does not store the value.
    return None if isinstance(value, list) and not value else value


def _setting(kernel: Any, results: Any, name: str) -> Any:
    value = _from_results(results, name)
    if value is None:
        given = [p[name] for p in _nested_parameters(kernel) if p.get(name) is not None]
        value = given[-1] if given else None
    return value


def _drop_unit_axes(value: Any, rank: int) -> jax.Array:
    """Makes `[num_chains, 1, 1]` to `[num_chains]`: one step size a chain."""
    value = jnp.asarray(value)
    while value.ndim > rank and value.shape[-1] == 1:
        value = value[..., 0]
    return value
