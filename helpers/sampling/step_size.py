"""Whether chains of a batch share a step size is said by the step size's shape."""

from typing import Any

import jax
import jax.numpy as jnp


def initial_step_size(step_size: float, state: Any, *, shared: bool) -> Any:
    """Makes a step size that the chains of a batch share, or one for each of them.

    TFP's adapting kernels average the acceptance over the chains that have a step size in common
    (with their `reduce_fn`, by default the arithmetic mean).

    Args:
      step_size: Where adaptation starts.
      state: The kernel's state, each leaf `[num_chains, ...]`.
      shared: True for one step size, False for one a chain.

    Returns:
      A scalar if shared; else a list with `[num_chains, 1, ...]` for each state part, and no list
      if the state is a single array. Every part adapts with the same acceptances from the same
      start, so the parts of one chain stay equal.

    Raises:
      ValueError: A leaf has no chain axis, or leaves differ in the number of chains.
    """
    leaves = jax.tree_util.tree_leaves(state)
    counts = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(counts) != 1 or () in counts:
        raise ValueError(
            "every leaf of state needs the same leading [num_chains], given shapes "
            f"{[jnp.shape(leaf) for leaf in leaves]}"
        )
    dtype = jnp.result_type(*leaves)
    if shared:
        return jnp.asarray(step_size, dtype)
    (num_chains,) = counts.pop()
    sizes = [
        jnp.full((num_chains,) + (1,) * (jnp.ndim(leaf) - 1), step_size, dtype) for leaf in leaves
    ]
    return sizes if isinstance(state, (list, tuple, dict)) else sizes[0]
