"""What runs on the devices: one compiled program that takes any number of steps up to a chunk's."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.sampling import across
from helpers.sampling.kernel_results import num_adaptation_steps, standard_trace

PyTree = Any
_NO_ADAPTATION = -1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which devices there are, and which part of a state is the same on all of them.

    Attributes:
      devices: Devices in the order of the axis, those of all processes.
      axis_name: Name of the axis.
      independent_chains: Each device runs chains of its own.
      treedef: Structure of the state.
      names: How to name each leaf of the state in a message.
      replicated: For each leaf of the state, whether all devices hold the same.
    """

    devices: tuple[jax.Device, ...]
    axis_name: str
    independent_chains: bool
    treedef: Any
    names: tuple[str, ...]
    replicated: tuple[bool, ...]

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """This process' devices."""
        return _local(self.devices)

    @property
    def is_spread(self) -> bool:
        """Whether other processes take part."""
        return len(self.local_devices) < len(self.devices)


def _local(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(device for device in devices if device.process_index == jax.process_index())


def make_layout(
    state: PyTree,
    replicated: PyTree,
    *,
    devices: Sequence[jax.Device],
    axis_name: str,
    independent_chains: bool,
) -> Layout:
    """Checks a state against the devices and says how it lies on them.

    Args:
      state: As given to `sample`.
      replicated: As given to `sample`.
      devices: Devices in the order of the axis.
      axis_name: Name of the axis.
      independent_chains: As given to `sample`.

    Returns:
      The layout.

    Raises:
      ValueError: `replicated` does not fit, or a leaf lacks its device axis.
    """
    if replicated is None:
        replicated = not independent_chains
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    try:
        flags = jax.tree_util.tree_map(
            lambda flag, part: [bool(flag)] * len(jax.tree_util.tree_leaves(part)),
            replicated,
            state,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"replicated={replicated!r} does not have the structure of initial_state, {treedef}; "
            "give one bool, or a bool a part"
        ) from error
    flags = tuple(jax.tree_util.tree_leaves(flags))
    if independent_chains and any(flags):
        raise ValueError(
            f"replicated={replicated!r} contradicts independent_chains=True: chains of their own "
            "differ by device; leave replicated out"
        )
    names = tuple("initial_state" + jax.tree_util.keystr(path) for path, _ in paths)
    for name, flag, (_, leaf) in zip(names, flags, paths):
        if not flag:
            _check_device_axis(name, leaf, len(_local(devices)))
    return Layout(tuple(devices), axis_name, independent_chains, treedef, names, flags)


def place_data(data: tuple[PyTree, ...], layout: Layout) -> tuple[PyTree, ...]:
    """Puts data on their devices, once for all chunks; what is there already stays.

    Args:
      data: Leaves `[num_devices, ...]` with this process' devices.
      layout: Where to.

    Returns:
      The same, with leaf `i` of the leading axis on device `i`.

    Raises:
      ValueError: A leaf lacks its device axis.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(data)[0]:
        _check_device_axis(f"data{jax.tree_util.keystr(path)}", leaf, len(layout.local_devices))
    if layout.is_spread:
        return jax.tree_util.tree_map(lambda leaf: across.place(leaf, layout), data)
    put = jax.pmap(lambda leaf: leaf, axis_name=layout.axis_name, devices=layout.devices)
    return jax.tree_util.tree_map(
        lambda leaf: leaf if _is_placed(leaf, layout.devices) else put(leaf), data
    )


def _is_placed(leaf: Any, devices: tuple[jax.Device, ...]) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.sharding.device_set != set(devices):
        return False
    return len(devices) == 1 or leaf.sharding.shard_shape(leaf.shape)[0] == 1


def _check_device_axis(name: str, leaf: Any, num_devices: int) -> None:
    if np.shape(leaf)[:1] != (num_devices,):
        raise ValueError(
            f"{name} of shape {np.shape(leaf)} is not spread over {num_devices} devices; expected "
            f"({num_devices}, ...), a leading axis with one entry a device"
        )


@dataclasses.dataclass(frozen=True)
class HostChunk:
    """What a chunk produced, moved to the host.

    Attributes:
      states: For each leaf of the state, `[num_kept, ...]` if replicated, else
        `[num_kept, num_devices, ...]`; none are kept in warm-up.
      trace: Each leaf of the trace, `[num_steps, ...]` or `[num_steps, num_devices, ...]`.
    """

    states: list[np.ndarray]
    trace: list[np.ndarray]


class Program:
    """A kernel's program on the devices, and where it stands between chunks.

    The carry is the state and the kernel's results, as a flat list of arrays `[num_devices, ...]`.
    """

    def __init__(
        self,
        kernel_fn: Callable[..., Any],
        trace_fn: Callable[..., dict[str, jax.Array]] | None,
        layout: Layout,
        initial_state: PyTree,
        data: tuple[PyTree, ...],
        *,
        seed: int,
        thin: int,
        chunk_size: int,
    ):
        """Evaluates the kernel's results at the initial state, and compiles nothing else yet."""
        self._key = jax.random.PRNGKey(seed)
        self._kernel_fn = kernel_fn
        self._trace_fn = trace_fn
        self._layout = layout
        self._data = data
        self._thin = thin
        self._chunk_size = chunk_size
        self._carry_treedef: Any = None
        self._key_impls: list[Any] = []
        self._compiled: Any = None

        num_devices = len(layout.local_devices)
        leaves = self._place(
            np.broadcast_to(leaf, (num_devices, *np.shape(leaf))) if replicated else leaf
            for leaf, replicated in zip(jax.tree_util.tree_leaves(initial_state), layout.replicated)
        )
        carry, adaptation, trace = self._pmap(self._start)(leaves, data)
        self._carry = carry
        self._trace_treedef = jax.tree_util.tree_structure(trace)
        self._trace_names = [
            "trace" + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(trace)[0]
        ]
        self._trace_dtypes = [leaf.dtype for leaf in jax.tree_util.tree_leaves(trace)]
        self._adaptation = int(np.max(across.local_rows(adaptation)))

    def _pmap(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        layout = self._layout
        if layout.is_spread:
            return across.pmap(function, layout, in_axes)
        return jax.pmap(
            function, axis_name=layout.axis_name, devices=layout.devices, in_axes=in_axes
        )

    def _place(self, leaves: Iterable[Any]) -> list[Any]:
        if self._layout.is_spread:
            return [across.place(leaf, self._layout) for leaf in leaves]
        return list(leaves)

    @property
    def num_adaptation_steps(self) -> int | None:
        """For how many steps the kernel adapts, or None if it does not."""
        return None if self._adaptation == _NO_ADAPTATION else self._adaptation

    @property
    def is_spread(self) -> bool:
        """Whether other processes take part."""
        return self._layout.is_spread

    @property
    def trace_treedef(self) -> Any:
        """Structure of the trace."""
        return self._trace_treedef

    @property
    def trace_dtypes(self) -> list[np.dtype]:
        """Dtype of each leaf of the trace."""
        return self._trace_dtypes

    @property
    def state_dtypes(self) -> list[np.dtype]:
        """Dtype of each leaf of the state."""
        return [leaf.dtype for leaf in self._carry[: len(self._layout.replicated)]]

    def compile(self) -> None:
        """Compiles the chunk for `run`."""
        zero = np.int32(0)
        chunk = self._pmap(self._chunk, in_axes=(0, None, None, None, 0))
        self._compiled = chunk.lower(self._carry, self._key, zero, zero, self._data).compile()

    def fingerprint(self) -> dict[str, str]:
        """Describes what decides the draws, apart from the seed and the number of steps.

        Call it before `run`. The program of one step stands for the model and the kernel; the
        kernel's results at the start hold the log density and its gradient, which stand for the
        data, and settings that adaptation needs.

        Returns:
          Descriptions by name.
        """
        step = self._pmap(self._single_step, in_axes=(0, None, None, 0))
        text = step.lower(self._carry, self._key, np.int32(0), self._data).as_text()
        carry = self.carry_to_host()
        num_parts = len(self._layout.replicated)
        devices = self._layout.devices
        described = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind}"
        if self._layout.is_spread:
            described += f" in {jax.process_count()} processes"
        return {
            "devices": described,
            "JAX": jax.__version__,
            "program (model, shapes, kernel)": _short_hash(
                [np.frombuffer(text.encode(), np.uint8)]
            ),
            "initial state": _short_hash(carry[:num_parts]),
            "kernel results there (data, kernel settings)": _short_hash(carry[num_parts:]),
        }

    def run(self, start: int, stop: int, *, keep: bool) -> HostChunk:
        """Takes the steps from `start` to `stop`.

        Args:
          start: Steps taken before.
          stop: Steps taken afterwards; at most a chunk's size more.
          keep: Whether to move states to the host.

        Returns:
          What the steps produced.

        Raises:
          ValueError: What should be the same on all devices is not.
        """
        self._carry, states, trace, digests = self._compiled(
            self._carry, self._key, np.int32(start), np.int32(stop - start), self._data
        )
        trace_replicated = [not self._layout.independent_chains] * len(self._trace_names)
        replicated = [*self._layout.replicated, *trace_replicated]
        self._check_replicated(digests, replicated)
        num_kept = (stop - start) // self._thin
        return HostChunk(
            states=[
                _to_host(leaf, flag, num_kept)
                for leaf, flag in zip(states, self._layout.replicated)
                if keep
            ],
            trace=[
                _to_host(leaf, flag, stop - start)
                for leaf, flag in zip(jax.tree_util.tree_leaves(trace), trace_replicated)
            ],
        )

    def carry_to_host(self) -> list[np.ndarray]:
        """Copies what is needed to go on.

        Returns:
          For each leaf `[num_devices, ...]`, or `[1, ...]` where the devices agree.
        """
        copies = [across.local_rows(leaf) for leaf in self._carry]
        return [
            copy[:1] if all(copy[0].tobytes() == other.tobytes() for other in copy[1:]) else copy
            for copy in copies
        ]

    def restore(self, carry: Sequence[np.ndarray]) -> None:
        """Goes back to where a run stood.

        Args:
          carry: From `carry_to_host`.
        """
        num_devices = len(self._layout.local_devices)
        self._carry = self._place(
            np.broadcast_to(as_dtype(copy, leaf.dtype), (num_devices, *leaf.shape[1:]))
            for copy, leaf in zip(carry, self._carry, strict=True)
        )

    # What follows runs inside pmap, on one device's part.

    def _start(self, state_leaves: list[Any], data: tuple[PyTree, ...]) -> tuple[Any, Any, Any]:
        kernel = self._kernel_fn(*data)
        state = jax.tree_util.tree_unflatten(
            self._layout.treedef, [jnp.asarray(leaf) for leaf in state_leaves]
        )
        results = kernel.bootstrap_results(state)
        leaves, self._carry_treedef = jax.tree_util.tree_flatten((state, results))
        self._key_impls = [_key_impl(leaf) for leaf in leaves]
        adaptation = num_adaptation_steps(kernel)
        return (
            self._pack(leaves),
            _NO_ADAPTATION if adaptation is None else adaptation,
            self._trace(kernel, state, results, data),
        )

    def _trace(self, kernel: Any, state: PyTree, results: Any, data: tuple[PyTree, ...]) -> dict:
        trace = standard_trace(kernel, results)
        if self._trace_fn is None:
            return trace
        extra = self._trace_fn(state, results, *data)
        if clash := trace.keys() & extra.keys():
            raise ValueError(
                f"trace_fn returned {sorted(clash)}, which is recorded already; use other names"
            )
        return {**trace, **{name: jnp.asarray(value) for name, value in extra.items()}}

    def _step(
        self, kernel: Any, carry: list[Any], key: jax.Array, index: Any, data: tuple[PyTree, ...]
    ) -> tuple[list[Any], dict]:
        state, results = self._unpack(carry)
        key = jax.random.fold_in(key, index)
        if self._layout.independent_chains:
            key = jax.random.fold_in(key, jax.lax.axis_index(self._layout.axis_name))
        new_state, results = kernel.one_step(state, results, seed=key)
        # TFP returns a list where a tuple was given.
        state = jax.tree_util.tree_unflatten(
            self._layout.treedef, jax.tree_util.tree_leaves(new_state)
        )
        trace = self._trace(kernel, state, results, data)
        return self._pack(jax.tree_util.tree_leaves((state, results))), trace

    def _single_step(self, carry: list[Any], key: Any, index: Any, data: Any) -> Any:
        return self._step(self._kernel_fn(*data), carry, key, index, data)

    def _chunk(self, carry: list[Any], key: Any, start: Any, length: Any, data: Any) -> Any:
        kernel = self._kernel_fn(*data)  # Outside the loop: what it prepares is prepared once.
        num_parts = len(self._layout.replicated)
        state_buffers = [
            jnp.zeros((self._chunk_size // self._thin, *leaf.shape), leaf.dtype)
            for leaf in carry[:num_parts]
        ]
        trace_buffers = jax.tree_util.tree_map(
            lambda leaf: jnp.zeros((self._chunk_size, *leaf.shape), leaf.dtype),
            jax.eval_shape(lambda: self._trace(kernel, *self._unpack(carry), data)),
        )

        def body(i: Any, loop: Any) -> Any:
            carry, states, traces = loop
            carry, trace = self._step(kernel, carry, key, start + i, data)
            # Steps between draws are overwritten by the draw.
            states = [_write(b, x, i // self._thin) for b, x in zip(states, carry[:num_parts])]
            traces = jax.tree_util.tree_map(lambda b, x: _write(b, x, i), traces, trace)
            return carry, states, traces

        carry, states, traces = jax.lax.fori_loop(
            0, length, body, (carry, state_buffers, trace_buffers)
        )
        digests = [_digest(leaf) for leaf in (*states, *jax.tree_util.tree_leaves(traces))]
        return carry, states, traces, digests

    def _pack(self, leaves: list[Any]) -> list[jax.Array]:
        """Makes all leaves plain arrays; current TFP has typed keys among them."""
        return [
            jax.lax.convert_element_type(leaf, jnp.result_type(leaf))
            if impl is None
            else jax.random.key_data(leaf)
            for leaf, impl in zip(leaves, self._key_impls, strict=True)
        ]

    def _unpack(self, carry: list[Any]) -> tuple[PyTree, Any]:
        leaves = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(carry, self._key_impls, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._carry_treedef, leaves)

    # On the host again.

    def _check_replicated(self, digests: list[jax.Array], replicated: list[bool]) -> None:
        names = [*self._layout.names, *self._trace_names]
        different = [
            name
            for name, flag, digest in zip(names, replicated, digests)
            if flag and np.ptp(across.local_rows(digest).astype(np.int64))
        ]
        if different:
            raise ValueError(
                f"not the same on all {len(self._layout.devices)} devices: {', '.join(different)}; "
                "the log density must be the sum over devices and its gradient with it (a sharded "
                "joint distribution, or jax.lax.psum), what trace_fn returns must be averaged "
                "(jax.lax.pmean), a state that is sharded must be told by replicated=False, and "
                "chains that have nothing to do with each other by independent_chains=True"
            )


def as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Gives an array from disk its dtype back, where NumPy's format did not keep it (bfloat16)."""
    return array if array.dtype == dtype else array.view(dtype)


def _short_hash(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _key_impl(leaf: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        return jax.random.key_impl(leaf)
    return None


def _write(buffer: jax.Array, value: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), index, 0)


def _digest(leaf: jax.Array) -> jax.Array:
    """Sums the bits with odd weights modulo 2**32, so that a single different value shows."""
    if leaf.dtype == jnp.bool_:
        bits = leaf
    else:
        width = min(leaf.dtype.itemsize, 4)
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * width}"))
    bits = bits.astype(jnp.uint32).ravel()
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _to_host(leaf: jax.Array, replicated: bool, length: int) -> np.ndarray:
    """Moves the first entries of a buffer, of one device if all hold the same."""
    if replicated:
        return np.asarray(leaf.addressable_shards[0].data).reshape(leaf.shape[1:])[:length]
    return np.moveaxis(across.local_rows(leaf), 0, 1)[:length]
