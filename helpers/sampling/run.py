"""Runs a TFP transition kernel under `pmap`, chunk by chunk.

A chunk is one call of one compiled program, which serves warm-up and draws of any number up to the
chunk size. Between chunks the host takes the draws, saves them and shows progress.

The key of step `t` is `fold_in(PRNGKey(seed), t)`, warm-up included, so it depends neither on the
chunk size nor on interruptions, and a run that is continued draws what it would have drawn. Equal
bits also need the same program on the same kind of processor: a checkpoint of another JAX, device
count or model is refused. Another chunk size is not, since its loop body is the same.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from helpers.checkpoint import Chunk, ChunkStore, process_directory
from helpers.sampling import across
from helpers.sampling.program import HostChunk, Program, as_dtype, make_layout, place_data

PyTree = Any


class SamplingInterrupted(KeyboardInterrupt):
    """The user stopped a run; the message says how to go on."""


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """How a run went.

    Attributes:
      num_devices: Devices used.
      device_kind: What they are.
      num_steps: Kernel steps of the whole run, warm-up included.
      num_loaded_steps: How many of them came from a checkpoint.
      compile_seconds: Time to trace and compile the chunk's program.
      seconds: Time of this call's steps, with moving, saving and showing them.
      leapfrogs_per_second: Gradients of a device's batch of chains a second in this call, however
        many chains and devices take part in one; not a number where the kernel takes no leapfrogs
        or every step was loaded.
    """

    num_devices: int
    device_kind: str
    num_steps: int
    num_loaded_steps: int
    compile_seconds: float
    seconds: float
    leapfrogs_per_second: float


@dataclasses.dataclass(frozen=True)
class Draws:
    """What a run returns, on the host.

    In all arrays the draw comes first. What differs by device has the devices second, what is
    replicated has no such axis.

    Attributes:
      states: The structure of the initial state, leaves `[num_draws, ...]` where replicated, else
        `[num_draws, num_devices, ...]`.
      trace: Quantities by name, of each kernel step after warm-up: `[num_draws * thin, ...]`, or
        `[num_draws * thin, num_devices, ...]` for independent chains.
      warmup_trace: The same for the steps of warm-up, `[num_warmup, ...]`.
      info: How the run went.
    """

    states: PyTree
    trace: dict[str, Any]
    warmup_trace: dict[str, Any]
    info: RunInfo

    @property
    def num_divergences(self) -> int:
        """Number of divergent trajectories after warm-up, over all chains."""
        if "diverging" not in self.trace:
            raise ValueError("this kernel's results do not tell the energy error of a step")
        return int(self.trace["diverging"].sum())


def sample(
    kernel_fn: Callable[..., Any],
    initial_state: PyTree,
    data: Sequence[PyTree] = (),
    *,
    num_draws: int,
    num_warmup: int,
    seed: int,
    axis_name: str,
    devices: Sequence[jax.Device] | None = None,
    replicated: PyTree = None,
    independent_chains: bool = False,
    thin: int = 1,
    chunk_size: int = 100,
    trace_fn: Callable[..., dict[str, jax.Array]] | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Draws:
    """Samples with a TFP kernel on all devices, in chunks.

    Device memory holds the draws of one chunk. With `checkpoint_dir` each chunk is saved, and a
    call with the same arguments goes on after the last good one; `num_draws` may grow.

    Where JAX runs in several processes (`helpers.launch`), each calls this with the same arguments,
    but for what has a device axis: there it gives, and gets, the part of its own devices. Process 0
    shows the progress; each saves its chunks in a folder of its own in `checkpoint_dir`.

    Args:
      kernel_fn: Called as `kernel_fn(*data)` inside `pmap`, with this device's part of the data;
        returns the transition kernel. What it closes over becomes a constant of the program.
      initial_state: Leaves as the kernel takes them if replicated, else `[num_devices, ...]`.
      data: Arguments of `kernel_fn`, leaves `[num_devices, ...]`.
      num_draws: Draws to return.
      num_warmup: Kernel steps before the first draw.
      seed: Of the random stream.
      axis_name: Name of the device axis in `kernel_fn`.
      devices: Devices to use; all if None, those of all processes.
      replicated: Whether a part of the state is the same on all devices: a bool, or bools in the
        structure of the state. True if None, except for independent chains.
      independent_chains: False if all devices work on the same chains: they get the same keys (TFP
        makes the momenta of a sharded part differ). True if each device runs chains of its own:
        keys differ by device, and nothing is replicated.
      thin: Kernel steps a draw; the last is kept.
      chunk_size: Kernel steps a chunk, a multiple of `thin`.
      trace_fn: Called as `trace_fn(state, kernel_results, *data)` after each step; what it returns
        is recorded beside the standard quantities. Unless chains are independent it has to be the
        same on all devices (`jax.lax.pmean`).
      checkpoint_dir: Folder for the chunks of this run, or None to save nothing.
      progress: Show a progress bar.

    Returns:
      The draws.

    Raises:
      ValueError: An argument does not fit; adaptation does not end before warm-up; what should be
        replicated differs by device.
      CheckpointError: The folder belongs to another run.
      SamplingInterrupted: Ctrl-C; chunks that were finished before are saved.

    Warns:
      helpers.checkpoint.DamagedChunkWarning: A saved chunk was damaged and is made again.
    """
    _check_counts(num_draws, num_warmup, thin, chunk_size)
    layout = make_layout(
        initial_state,
        replicated,
        devices=jax.devices() if devices is None else devices,
        axis_name=axis_name,
        independent_chains=independent_chains,
    )
    program = Program(
        kernel_fn,
        trace_fn,
        layout,
        initial_state,
        place_data(tuple(data), layout),
        seed=seed,
        thin=thin,
        chunk_size=chunk_size,
    )
    _check_adaptation(program.num_adaptation_steps, num_warmup)
    host = HostDraws(num_warmup, num_draws, thin)
    store, loaded = None, 0
    if checkpoint_dir is not None:
        run = {"seed": repr(seed), "num_warmup": repr(num_warmup), "thin": repr(thin)}
        num_processes = jax.process_count() if layout.is_spread else 1
        folder = process_directory(checkpoint_dir, jax.process_index(), num_processes)
        store = ChunkStore(folder, {**run, **program.fingerprint()})
        loaded = _restore(store, program, host)
    start_time = time.perf_counter()
    if loaded < host.num_steps:
        program.compile()
    compiled_time = time.perf_counter()
    shows = progress and (jax.process_index() == 0 or not layout.is_spread)
    leapfrogs = take_steps(program, host, store, loaded, chunk_size, shows)
    seconds = time.perf_counter() - compiled_time
    info = RunInfo(
        num_devices=len(layout.devices),
        device_kind=layout.devices[0].device_kind,
        num_steps=host.num_steps,
        num_loaded_steps=min(loaded, host.num_steps),
        compile_seconds=compiled_time - start_time,
        seconds=seconds,
        leapfrogs_per_second=leapfrogs / seconds if leapfrogs else float("nan"),
    )
    trace, warmup_trace = (
        jax.tree_util.tree_unflatten(program.trace_treedef, leaves)
        for leaves in (host.trace, host.warmup_trace)
    )
    states = jax.tree_util.tree_unflatten(layout.treedef, host.states)
    return Draws(states, trace, warmup_trace, info)


class HostDraws:
    """The arrays of the whole run on the host, filled chunk by chunk."""

    def __init__(self, num_warmup: int, num_draws: int, thin: int):
        self.num_warmup = num_warmup
        self.num_steps = num_warmup + num_draws * thin
        self._num_draws = num_draws
        self._thin = thin
        self.states: list[np.ndarray] = []
        self.trace: list[np.ndarray] = []
        self.warmup_trace: list[np.ndarray] = []

    def put(self, start: int, chunk: HostChunk) -> None:
        """Copies a chunk to its place; what lies past the end is left out."""
        if not self.trace:
            num_trace = self.num_steps - self.num_warmup
            self.trace = [_empty(num_trace, leaf) for leaf in chunk.trace]
            self.warmup_trace = [_empty(self.num_warmup, leaf) for leaf in chunk.trace]
        if start < self.num_warmup:
            _copy(self.warmup_trace, start, chunk.trace)
            return
        if not self.states:
            self.states = [_empty(self._num_draws, leaf) for leaf in chunk.states]
        _copy(self.trace, start - self.num_warmup, chunk.trace)
        _copy(self.states, (start - self.num_warmup) // self._thin, chunk.states)


def _empty(length: int, like: np.ndarray) -> np.ndarray:
    return np.empty((length, *like.shape[1:]), like.dtype)


def _copy(targets: list[np.ndarray], start: int, sources: list[np.ndarray]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[start : start + len(source)] = source[: len(target) - start]


def take_steps(
    program: Program,
    host: HostDraws,
    store: ChunkStore | None,
    start: int,
    chunk_size: int,
    progress: bool,
) -> int:
    """Runs what is left of a run and returns the leapfrogs it took."""
    leapfrogs, done = 0, start
    start_time = time.perf_counter()
    bar = tqdm(total=host.num_steps, initial=start, unit="step", disable=not progress)
    try:
        for begin, stop in _spans(start, host.num_warmup, host.num_steps, chunk_size):
            chunk = program.run(begin, stop, keep=stop > host.num_warmup)
            host.put(begin, chunk)
            if store is not None:
                store.save(Chunk(begin, stop, _to_arrays(program, chunk)))
            done = stop
            trace = jax.tree_util.tree_unflatten(program.trace_treedef, chunk.trace)
            leapfrogs += _count_leapfrogs(trace)
            bar.set_description("warm-up" if stop <= host.num_warmup else "draws", refresh=False)
            rate = leapfrogs / (time.perf_counter() - start_time)
            bar.set_postfix(_figures(trace, rate), refresh=False)
            bar.update(stop - begin)
    except KeyboardInterrupt as interrupt:
        raise SamplingInterrupted(_how_to_resume(done, host.num_steps, store)) from interrupt
    finally:
        bar.close()
    return leapfrogs


def _spans(
    start: int, num_warmup: int, num_steps: int, chunk_size: int
) -> Iterator[tuple[int, int]]:
    """Cuts a run into chunks, none of which holds both warm-up and draws."""
    while start < num_steps:
        stop = min(start + chunk_size, num_warmup if start < num_warmup else num_steps)
        yield start, stop
        start = stop


def _to_arrays(program: Program, chunk: HostChunk) -> dict[str, np.ndarray]:
    groups = {"carry": program.carry_to_host(), "state": chunk.states, "trace": chunk.trace}
    return {f"{name}.{i}": leaf for name, group in groups.items() for i, leaf in enumerate(group)}


def _restore(store: ChunkStore, program: Program, host: HostDraws) -> int:
    """Takes over the saved chunks and returns how many steps they hold."""
    stop = 0
    chunks = _common_chunks(store.load(), program.is_spread)
    for chunk in chunks:
        if chunk.start >= host.num_steps:
            break
        trace = [
            as_dtype(leaf, dtype)
            for leaf, dtype in zip(_group(chunk, "trace"), program.trace_dtypes, strict=True)
        ]
        states = [
            as_dtype(leaf, dtype)
            for leaf, dtype in zip(_group(chunk, "state"), program.state_dtypes)
        ]
        host.put(chunk.start, HostChunk(states, trace))
        stop = chunk.stop
    if chunks:
        program.restore(_group(chunks[-1], "carry"))
    return stop


def _common_chunks(chunks: list[Chunk], is_spread: bool) -> list[Chunk]:
    """Leaves out chunks that another process has not: it may have died before it saved them."""
    while is_spread:
        own = chunks[-1].stop if chunks else 0
        least = across.agree_on_least(own)
        chunks = [chunk for chunk in chunks if chunk.stop <= least]
        # Chunks of another size may end elsewhere: go on until all end at the same step.
        if across.agree_on_least(-int(own != least)) == 0:
            break
    return chunks


def _group(chunk: Chunk, name: str) -> list[np.ndarray]:
    count = sum(key.startswith(f"{name}.") for key in chunk.arrays)
    return [chunk.arrays[f"{name}.{i}"] for i in range(count)]


def _count_leapfrogs(trace: dict[str, Any]) -> int:
    """Gradients that the chunk took one after the other: a batch waits for its longest chain."""
    if "num_leapfrogs" not in trace:
        return 0
    counts = trace["num_leapfrogs"]
    return int(counts.reshape(len(counts), -1).max(axis=1).sum(dtype=np.int64))


def _figures(trace: dict[str, Any], rate: float) -> dict[str, str]:
    figures = {}
    if "acceptance" in trace:
        figures["acceptance"] = f"{trace['acceptance'].mean():.2f}"
    if "step_size" in trace:
        last = [np.mean(part[-1]) for part in jax.tree_util.tree_leaves(trace["step_size"])]
        figures["step size"] = f"{np.mean(last):.3g}"
    if rate:
        figures["leapfrogs/s"] = f"{rate:.3g}"
    return figures


def _how_to_resume(done: int, num_steps: int, store: ChunkStore | None) -> str:
    if store is None:
        return (
            f"stopped after {done} of {num_steps} steps, which are lost; with checkpoint_dir=... "
            "a stopped run can go on"
        )
    return (
        f"stopped after {done} of {num_steps} steps, which are saved in {store.directory}; the "
        "same call goes on from there"
    )


def _check_counts(num_draws: int, num_warmup: int, thin: int, chunk_size: int) -> None:
    least = {"num_draws": (num_draws, 1), "num_warmup": (num_warmup, 0), "thin": (thin, 1)}
    for name, (value, minimum) in {**least, "chunk_size": (chunk_size, 1)}.items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, given {value}")
    if chunk_size % thin:
        raise ValueError(
            f"chunk_size={chunk_size} kernel steps do not hold a whole number of draws of thin="
            f"{thin} steps; give chunk_size={(chunk_size // thin + 1) * thin}"
        )


def _check_adaptation(num_adaptation_steps: int | None, num_warmup: int) -> None:
    if num_adaptation_steps is None or 0 < num_adaptation_steps < num_warmup:
        return
    raise ValueError(
        f"the kernel adapts its step size for num_adaptation_steps={num_adaptation_steps} of "
        f"num_warmup={num_warmup} steps; adaptation must end before warm-up does, so that draws "
        "come from one kernel that has settled: give num_adaptation_steps about 0.8 * num_warmup"
        + (f" = {int(0.8 * num_warmup)}" if num_warmup > 1 else "")
    )
