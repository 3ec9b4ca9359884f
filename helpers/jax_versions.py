"""What the notebooks use of JAX that has another name in jax 0.4.30 than in current releases.

Goes when lane A does: then `jax.shard_map` is all there is.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh


def shard_map(
    function: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any, check: bool = True
) -> Callable[..., Any]:
    """Maps a function over the shards of its arguments: `jax.shard_map` under one name.

    Args:
      function: What runs on each device, on the device's part of each argument; it may use
        collectives over the axes of the mesh.
      mesh: Devices and the names of their axes.
      in_specs: A `PartitionSpec` for each argument, or pytrees of them.
      out_specs: The same for what the function returns.
      check: Track which values are the same on all devices of an axis: `check_vma` of current JAX
        (since 0.6), `check_rep` before. Without it an output whose spec leaves out an axis is
        taken from one device and not looked at, and `psum` is differentiated as `pmap` does it.

    Returns:
      A function of whole arrays; wrap it in `jax.jit`.
    """
    specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, **specs, check_vma=check)
    from jax.experimental.shard_map import shard_map as experimental_shard_map

    return experimental_shard_map(function, **specs, check_rep=check)
