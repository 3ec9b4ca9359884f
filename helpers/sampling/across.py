"""One program over the devices of several processes, where `pmap` cannot be compiled ahead of time.

With several processes, what `pmap` takes and returns are each process' own arrays, and current JAX
compiles no such program before its first call. So the same mapping is written here as `shard_map`
over a mesh of all devices: arrays are global, `[num_devices, ...]`, and a process sees the rows of
its own devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers.jax_versions import shard_map


def _mesh(layout: Any) -> Mesh:
    return Mesh(np.asarray(layout.devices), (layout.axis_name,))


def place(leaf: Any, layout: Any) -> jax.Array:
    """Makes a global array of the rows that each process has.

    Args:
      leaf: This process' rows, `[num_local_devices, ...]`, in the order of its devices.
      layout: Where to.

    Returns:
      `[num_devices, ...]`, a row on each device.
    """
    rows = np.asarray(leaf)
    rows = rows.astype(jax.dtypes.canonicalize_dtype(rows.dtype), copy=False)
    sharding = NamedSharding(_mesh(layout), PartitionSpec(layout.axis_name))
    parts = [
        jax.device_put(row, device) for row, device in zip(rows[:, None], layout.local_devices)
    ]
    shape = (len(layout.devices), *rows.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def local_rows(leaf: Any) -> np.ndarray:
    """Copies this process' rows to the host.

    Args:
      leaf: `[num_devices, ...]`, of one process or of several.

    Returns:
      `[num_local_devices, ...]`.
    """
    if getattr(leaf, "is_fully_addressable", True):
        return np.asarray(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def pmap(function: Callable[..., Any], layout: Any, in_axes: Any) -> Any:
    """Maps a function over the devices of all processes.

    Args:
      function: What runs on a device, on its row of each argument.
      layout: Devices and the name of their axis.
      in_axes: As of `jax.pmap`: 0, or a tuple of 0 and None.

    Returns:
      A function of global arrays, as `jax.jit` returns it.
    """

    def on_device(*arguments):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(arguments)
        rows = [
            argument if axis is None else jax.tree_util.tree_map(lambda leaf: leaf[0], argument)
            for axis, argument in zip(axes, arguments, strict=True)
        ]
        return jax.tree_util.tree_map(lambda leaf: jax.numpy.asarray(leaf)[None], function(*rows))

    def mapped(*arguments):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(arguments)
        specs = tuple(
            PartitionSpec() if axis is None else PartitionSpec(layout.axis_name) for axis in axes
        )
        # check=False: collectives are differentiated as pmap does it.
        return shard_map(
            on_device,
            mesh=_mesh(layout),
            in_specs=specs,
            out_specs=PartitionSpec(layout.axis_name),
            check=False,
        )(*arguments)

    return jax.jit(mapped)


def agree_on_least(value: int) -> int:
    """Finds the least value that any process has.

    Args:
      value: This process' own, of 32 bits.

    Returns:
      The same in every process.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.int32(value)).min())
