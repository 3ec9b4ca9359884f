"""Pytrees of arrays to devices and back, with padding where a size does not divide.

`pmap` takes arrays `[num_devices, ...]`. The functions here make them, put one slice on each device
and check first what JAX would complain about later and less clearly. They run outside `jit` and
`pmap`; a size that the number of devices does not divide is refused or padded, as the caller says.

Where JAX runs in several processes (`helpers.launch`), rows are split over the devices of all of
them. Each process is given all rows and holds those of its own devices: `num_devices` is then the
number of its local devices in what is returned.
"""

from typing import Any, Literal, overload

import jax
import numpy as np

PyTree = Any


@overload
def shard(
    tree: PyTree, num_devices: int | None = ..., *, pad: Literal[False] = ..., unit: str = ...
) -> PyTree: ...


@overload
def shard(
    tree: PyTree, num_devices: int | None = ..., *, pad: Literal[True], unit: str = ...
) -> tuple[PyTree, jax.Array]: ...


def shard(tree, num_devices=None, *, pad=False, unit="rows"):
    """Splits the leading axis of every array over devices.

    Args:
      tree: Arrays `[num_rows, ...]` with the same `num_rows`, NumPy's or JAX's, in any pytree.
        Their dtypes stay.
      num_devices: How many of the local devices to use, the first ones; all if None, those of all
        processes.
      pad: Whether to pad with zeros to a multiple of `num_devices`.
      unit: What a row is, for messages: "users".

    Returns:
      The tree with arrays `[num_devices, rows_per_device, ...]`, a slice on each device. With
      `pad` a pair of this tree and the mask, bool `[num_devices, rows_per_device]`, True where the
      row is real: models must leave the others out.

    Raises:
      ValueError: Scalars, an empty tree or axis, leading sizes that differ, more devices than
        there are, or a size that the number of devices does not divide and `pad` is False.
      TypeError: Called under `jit`, `pmap` or another transformation.
    """
    num_rows = _common_leading_size(tree, "shard")
    if pad:
        padded, mask = pad_to_devices(tree, num_devices)
        return shard(padded, num_devices), shard(mask, num_devices)
    here = _local_positions(num_devices)
    num_devices = jax.device_count() if num_devices is None else _check_num_devices(num_devices)
    if num_rows % num_devices:
        raise ValueError(
            f"cannot shard {num_rows} {unit} over {num_devices} devices; pad with "
            "sharding.pad_to_devices(...) or pass pad=True"
        )

    def split(leaf):
        leaf = _host_array(leaf)
        shape = (num_devices, num_rows // num_devices, *leaf.shape[1:])
        return _put(leaf.reshape(shape)[here], len(here))

    return jax.tree_util.tree_map(split, tree)


def unshard(tree: PyTree, mask: Any = None) -> PyTree:
    """Joins what `shard` split, on the host.

    Args:
      tree: Arrays `[num_devices, rows_per_device, ...]`.
      mask: Which rows are real, bool `[num_devices, rows_per_device]`, as `shard` returns it: the
        others are dropped. All are kept if None.

    Returns:
      The tree with NumPy arrays `[num_rows, ...]`.

    Raises:
      ValueError: An array has fewer than two axes, the two leading sizes of arrays differ, or the
        mask does not have these sizes.
      TypeError: Called under a transformation.
    """
    leaves = _leaves(tree, "unshard")
    shapes = {name: leaf.shape for name, leaf in leaves}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(
                f"unshard needs arrays [num_devices, rows_per_device, ...], {name} has shape "
                f"{shape}; use unreplicate for what is replicated"
            )
    leading = {name: shape[:2] for name, shape in shapes.items()}
    if len(set(leading.values())) > 1:
        raise ValueError(f"unshard needs the same two leading sizes everywhere, given {leading}")
    if mask is not None:
        mask = np.asarray(mask)
        expected = next(iter(leading.values()))
        if mask.shape != expected or mask.dtype != bool:
            raise ValueError(
                f"mask must be bool {list(expected)}, given {mask.dtype} {list(mask.shape)}"
            )

    def join(leaf):
        leaf = _host_array(leaf)
        if mask is not None:
            return leaf[mask]
        return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

    return jax.tree_util.tree_map(join, tree)


def pad_to_devices(tree: PyTree, num_devices: int | None = None) -> tuple[PyTree, np.ndarray]:
    """Pads the leading axis with zeros to a multiple of the number of devices.

    Args:
      tree: Arrays `[num_rows, ...]` with the same `num_rows`.
      num_devices: All if None, those of all processes.

    Returns:
      The tree with NumPy arrays `[num_padded_rows, ...]`, and the mask, bool `[num_padded_rows]`,
      True for the rows that were there.

    Raises:
      ValueError: As `shard`, but for the size that does not divide.
      TypeError: Called under a transformation.
    """
    num_devices = jax.device_count() if num_devices is None else _check_num_devices(num_devices)
    num_rows = _common_leading_size(tree, "pad_to_devices")
    missing = -num_rows % num_devices

    def pad(leaf):
        leaf = _host_array(leaf)
        return np.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

    mask = np.arange(num_rows + missing) < num_rows
    return jax.tree_util.tree_map(pad, tree), mask


def replicate(tree: PyTree, num_devices: int | None = None) -> PyTree:
    """Puts a copy of every array on each device.

    Args:
      tree: Arrays or numbers of any shape `[...]`.
      num_devices: How many of the local devices to use, the first ones; all if None.

    Returns:
      The tree with arrays `[num_devices, ...]`, a copy on each device.

    Raises:
      ValueError: The tree is empty, or there are not so many devices.
      TypeError: Called under a transformation.
    """
    num_devices = _check_num_devices(num_devices)
    _leaves(tree, "replicate")

    def copy(leaf):
        leaf = _host_array(leaf)
        return _put(np.broadcast_to(leaf, (num_devices, *leaf.shape)), num_devices)

    return jax.tree_util.tree_map(copy, tree)


def unreplicate(tree: PyTree) -> PyTree:
    """Returns the first device's copy of every array.

    Args:
      tree: Arrays `[num_devices, ...]` that are equal along the first axis; this is not checked.

    Returns:
      The tree with arrays `[...]`.

    Raises:
      ValueError: The tree is empty, holds a scalar, or the leading sizes differ.
      TypeError: Called under a transformation.
    """
    _common_leading_size(tree, "unreplicate")
    return jax.tree_util.tree_map(lambda leaf: leaf[0], tree)


def _local_positions(num_devices: int | None) -> list[int]:
    """Which of the devices in use are this process' own."""
    if num_devices is not None:
        return list(range(_check_num_devices(num_devices)))
    own = jax.process_index()
    return [i for i, device in enumerate(jax.devices()) if device.process_index == own]


def _check_num_devices(num_devices: int | None) -> int:
    available = jax.local_device_count()
    if num_devices is None:
        return available
    integer = isinstance(num_devices, (int, np.integer)) and not isinstance(num_devices, bool)
    if not integer or num_devices < 1:
        raise ValueError(f"num_devices must be a positive integer or None, given {num_devices!r}")
    if num_devices > available:
        raise ValueError(
            f"num_devices is {num_devices}, and JAX has {available} here (nested pmaps need the "
            "product of their sizes); call devices.request_devices before JAX starts, or use fewer"
        )
    return int(num_devices)


def _leaves(tree: PyTree, caller: str) -> list[tuple[str, Any]]:
    """Lists leaves with names for messages, having refused traced ones."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    if not paths:
        raise ValueError(f"{caller} was given a tree without arrays")
    leaves = []
    for path, leaf in paths:
        name = f"tree{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{caller} moves data between host and devices; {name} is traced: call it outside "
                "jit, pmap and vmap"
            )
        leaves.append((name, leaf if hasattr(leaf, "shape") else np.asarray(leaf)))
    return leaves


def _common_leading_size(tree: PyTree, caller: str) -> int:
    leaves = _leaves(tree, caller)
    for name, leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"{caller} works along the leading axis, {name} is a scalar; use replicate for it"
            )
    sizes = {name: leaf.shape[0] for name, leaf in leaves}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{caller} needs the same leading size everywhere, given {sizes}")
    size = next(iter(sizes.values()))
    if not size:
        raise ValueError(f"{caller} was given arrays without rows: {sizes}")
    return size


def _host_array(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    # What JAX would make of a Python number or of 64 bits; uint8 and the like stay.
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _put(stacked: np.ndarray, num_devices: int) -> jax.Array:
    """Puts row i of `stacked` on local device i, so that `pmap` finds it there.

    Before jax 0.8, `pmap` copies arrays with a named sharding on every call; what it takes as it is
    comes from `device_put_sharded`, which jax 0.10 removed. The first branch goes with lane A.
    """
    devices = jax.local_devices()[:num_devices]
    if jax.version.__version_info__ < (0, 8):
        return jax.device_put_sharded(list(stacked), devices)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    return jax.device_put(stacked, sharding)
