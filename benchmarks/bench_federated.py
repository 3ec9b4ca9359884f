"""How fast a federated round is: ours, hand-written JAX, and TFF's native stack.

    python benchmarks/bench_federated.py [--quick]

The model is softmax regression 784 x 10 with batches of 50 examples and step 0.001, one pass of SGD
at each client, then the mean over clients. Every table says what is compared; nothing fails when a
target is missed.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import _report
import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax

PIXELS, CLASSES, BATCH_SIZE, NUM_BATCHES = 784, 10, 50, 10
STEP_SIZE = 0.001
TARGETS = {2: 1.2, 20: 1.05, 200: 1.05}  # number of clients: largest ratio to lax.map + lax.scan

OURS, MAP_SCAN, FLAT = "ours", "lax.map + lax.scan", "flat fori_loop"
NATIVE = "TFF native, TensorFlow"


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: dict[int, float]  # each feed of a round, by number of clients
    overhead_seconds: float
    native_clients: tuple[int, ...]
    native_seconds: float  # each number of clients
    native_timeout: float
    rounds: dict[int, int]  # of the memory measurement, by number of clients
    child_timeout: float


FULL = Effort({2: 3.0, 20: 6.0, 200: 15.0}, 3.0, (2, 20), 8.0, 150.0, {20: 100, 200: 25}, 150.0)
QUICK = Effort({2: 0.5, 20: 1.0, 200: 1.0}, 0.5, (2,), 2.0, 25.0, {20: 20}, 30.0)


# The model, written once for all the JAX sides.


def loss(model, batch):
    """Mean softmax cross-entropy of a batch."""
    logits = batch["pixels"] @ model["weights"] + model["bias"]
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(batch["labels"], CLASSES) * log_probability, axis=1))


def sgd_step(model, batch):
    """One step of SGD."""
    gradient = jax.grad(loss)(model, batch)
    return jax.tree_util.tree_map(lambda p, g: p - STEP_SIZE * g, model, gradient)


def initial_model(pixels: int = PIXELS):
    """The model of zeros, as NumPy arrays."""
    return collections.OrderedDict(
        weights=np.zeros((pixels, CLASSES), np.float32), bias=np.zeros((CLASSES,), np.float32)
    )


def make_cohort(
    num_clients: int,
    num_batches: int = NUM_BATCHES,
    batch_size: int = BATCH_SIZE,
    pixels: int = PIXELS,
    seed: int = 0,
) -> list[list[dict]]:
    """Random batches of each client: pixels uniform in [0, 1), labels uniform in 0 to 9."""
    rng = np.random.default_rng(seed)

    def batch():
        return collections.OrderedDict(
            pixels=rng.random((batch_size, pixels), np.float32),
            labels=rng.integers(0, CLASSES, batch_size, np.int32),
        )

    return [[batch() for _ in range(num_batches)] for _ in range(num_clients)]


def stack(cohort: list[list[dict]]) -> dict[str, np.ndarray]:
    """Stacks equally many batches of each client to `[num_clients, num_batches, ...]`."""
    shape = (len(cohort), len(cohort[0]))

    def field(name):
        rows = np.stack([batch[name] for client in cohort for batch in client])
        return rows.reshape(shape + rows.shape[1:])

    return {name: field(name) for name in cohort[0][0]}


@jax.jit
def map_scan_round(model, data):
    """The round that one writes by hand: `lax.map` over clients, `lax.scan` over batches, mean."""

    def client(batches):
        return lax.scan(lambda m, batch: (sgd_step(m, batch), None), model, batches)[0]

    return _mean(lax.map(client, data))


@jax.jit
def flat_round(model, data):
    """The same round with one slice a batch: scan slices a slice of the client that map took."""
    num_clients, num_batches = data["labels"].shape[:2]
    flat = jax.tree_util.tree_map(
        lambda x: x.reshape((num_clients * num_batches, *x.shape[2:])), data
    )

    def take(index):
        return jax.tree_util.tree_map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), flat
        )

    def client(k, trained):
        own = lax.fori_loop(
            0, num_batches, lambda i, m: sgd_step(m, take(k * num_batches + i)), model
        )
        return jax.tree_util.tree_map(lambda all_, one: all_.at[k].set(one), trained, own)

    room = jax.tree_util.tree_map(lambda x: jnp.zeros((num_clients, *x.shape), x.dtype), model)
    return _mean(lax.fori_loop(0, num_clients, client, room))


def _mean(models):
    return jax.tree_util.tree_map(lambda x: jnp.mean(x, axis=0), models)


HAND_WRITTEN = {MAP_SCAN: map_scan_round, FLAT: flat_round}


def build_process(pixels: int = PIXELS, batch_size: int = BATCH_SIZE):
    """The standard API's process for the same model."""
    from helpers import federated

    batch_type = collections.OrderedDict(
        pixels=(np.float32, (batch_size, pixels)), labels=(np.int32, (batch_size,))
    )
    model_type = collections.OrderedDict(
        weights=(np.float32, (pixels, CLASSES)), bias=(np.float32, (CLASSES,))
    )
    return federated.build_jax_federated_averaging_process(batch_type, model_type, loss, STEP_SIZE)


def use_our_context():
    """Makes our runtime TFF's default and returns its context."""
    from helpers import federated
    from helpers.federated import tff

    context = federated.create_local_python_execution_context()
    tff.framework.set_default_context(context)
    return context


def hand_written_call(function: Callable, model, cohort=None, device_data=None) -> Callable:
    """A call without arguments of a hand-written round; its result is in NumPy arrays."""
    if device_data is not None:
        return lambda: jax.device_get(function(model, device_data))
    return lambda: jax.device_get(function(model, stack(cohort)))


# One round.


def bench_rounds(effort: Effort, context) -> None:
    process = build_process()
    data_type = process.next.type_signature.parameter[1]
    model = initial_model()
    rows = []
    for num_clients, seconds in effort.seconds.items():
        cohort = make_cohort(num_clients)
        device_data = jax.block_until_ready(jax.device_put(stack(cohort)))
        our_data = context.device_put(cohort, data_type)
        feeds = {
            "on the device": (
                functools.partial(process.next, model, our_data),
                {"device_data": device_data},
            ),
            "NumPy lists": (functools.partial(process.next, model, cohort), {"cohort": cohort}),
        }
        for feed, (ours, theirs) in feeds.items():
            functions = {OURS: ours} | {
                name: hand_written_call(function, model, **theirs)
                for name, function in HAND_WRITTEN.items()
            }
            times = _report.time_interleaved(functions, seconds)
            case = f"{num_clients} clients, {feed}"
            target = TARGETS[num_clients]
            rows.append(_report.ratio_row(case, times, OURS, MAP_SCAN, target))
            rows.append(_report.ratio_row("", times, OURS, FLAT))
        del cohort, device_data, our_data, feeds, functions, ours, theirs
        gc.collect()
    _report.print_table(
        f"One round, {NUM_BATCHES} batches a client, result in NumPy: ours against hand-written",
        rows,
        f"Ratios below 1: ours is faster. '{FLAT}' is the best hand-written round: it slices each "
        "batch once,\nas our runtime does; the ratio to it is what the runtime costs.",
    )


# TFF's native stack, in a child.


def build_native_round():
    """The same round in TensorFlow, as TFF's native stack runs it."""
    import tensorflow as tf

    from helpers.federated import tff

    batch_type = tff.to_type(
        collections.OrderedDict(
            pixels=(np.float32, (BATCH_SIZE, PIXELS)), labels=(np.int32, (BATCH_SIZE,))
        )
    )
    model_type = tff.to_type(
        collections.OrderedDict(
            weights=(np.float32, (PIXELS, CLASSES)), bias=(np.float32, (CLASSES,))
        )
    )

    def step(model, batch):
        with tf.GradientTape() as tape:
            tape.watch(model)
            logits = batch["pixels"] @ model["weights"] + model["bias"]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
            mean_loss = tf.reduce_mean(losses)
        gradient = tape.gradient(mean_loss, model)
        return collections.OrderedDict(
            (name, model[name] - STEP_SIZE * gradient[name]) for name in model
        )

    @tff.tensorflow.computation(model_type, tff.SequenceType(batch_type))
    def train_client(model, batches):
        return batches.reduce(model, step)

    @tff.federated_computation(
        tff.FederatedType(model_type, tff.SERVER),
        tff.FederatedType(tff.SequenceType(batch_type), tff.CLIENTS),
    )
    def one_round(model, client_data):
        sent = tff.federated_broadcast(model)
        return tff.federated_mean(tff.federated_map(train_client, (sent, client_data)))

    return one_round


def native_child(clients: str, seconds: str, path: str) -> None:
    """Times ours and the native stack in turns and writes what it has after each cohort size."""
    import tensorflow as tf

    from helpers.federated import tff

    ours_context = use_our_context()
    process, native_round = build_process(), build_native_round()
    native_context = tff.backends.native.create_sync_local_cpp_execution_context()
    contexts, model = tff.framework.get_context_stack(), initial_model()
    results = {}
    for num_clients in map(int, clients.split(",")):
        cohort = make_cohort(num_clients)
        datasets = [
            tf.data.Dataset.from_tensor_slices(
                collections.OrderedDict((k, v[0]) for k, v in stack([c]).items())
            )
            for c in cohort
        ]

        def ours(cohort=cohort):
            with contexts.install(ours_context):
                return process.next(model, cohort)

        def native(datasets=datasets):
            with contexts.install(native_context):
                return native_round(model, datasets)

        difference = max(
            float(np.abs(a - b).max())
            for a, b in zip(ours().values(), native().values(), strict=True)
        )
        times = _report.time_interleaved({OURS: ours, NATIVE: native}, float(seconds))
        results[num_clients] = {
            "times": {name: values.tolist() for name, values in times.items()},
            "difference": difference,
        }
        _report.write_result(path, results)


def bench_native(effort: Effort) -> None:
    clients = ",".join(map(str, effort.native_clients))
    rows, note = [], ""
    try:
        results = _report.run_child(
            __file__,
            ["--child", "native", clients, str(effort.native_seconds)],
            effort.native_timeout,
        )
    except _report.ChildError as error:
        results, note = {}, f"not measured: {error}"
    for num_clients, result in results.items():
        times = {name: np.asarray(values) for name, values in result["times"].items()}
        row = _report.ratio_row(f"{num_clients} clients", times, OURS, NATIVE)
        rows.append(row | {"model differs by": f"{result['difference']:.0e}"})
    _report.print_table(
        "One round from host data (ours: NumPy lists, native: tf.data.Dataset) against TFF's "
        "native stack",
        rows,
        note,
    )


# Compile time and memory, in a child each.


def memory_child(side: str, clients: str, rounds: str, path: str) -> None:
    """Follows the resident memory over rounds on one cohort, then on a new cohort each round."""
    num_clients, num_rounds = int(clients), int(rounds)
    model = initial_model()
    jax.block_until_ready(jnp.zeros(1) + 1)  # JAX's own start-up is not the round's.
    context, build_seconds = None, 0.0
    if side == OURS:
        context = use_our_context()
        start = time.perf_counter()
        run = build_process().next
        build_seconds = time.perf_counter() - start
    else:

        def run(model, cohort):
            return jax.device_get(map_scan_round(model, stack(cohort)))

    result = {"imports": _resident()}
    cohort = make_cohort(num_clients)
    result["data"] = _resident()
    start = time.perf_counter()
    run(model, cohort)
    first = time.perf_counter() - start
    steady = []
    for index in range(num_rounds):
        start = time.perf_counter()
        model = run(model, cohort)
        steady.append(time.perf_counter() - start)
        if index == 4:
            result["after 5"] = _resident()
    result["after all"], result["peak"] = _resident(), _peak()
    result["compile"] = build_seconds + first - float(np.median(steady))
    if context is not None:
        info = context.cache_info()
        result |= {"traces": info.traces, "compilations": info.compilations}
        # New clients in a new order, some with fewer batches.
        rng = np.random.default_rng(1)
        for index in range(num_rounds):
            chosen = rng.integers(0, num_clients, num_clients)
            sizes = rng.integers(NUM_BATCHES // 2, NUM_BATCHES + 1, num_clients)
            model = run(model, [cohort[k][:n] for k, n in zip(chosen, sizes, strict=True)])
            if index == 4:
                result["new after 5"] = _resident()
        result["new after all"], result["new peak"] = _resident(), _peak()
        result["new compilations"] = context.cache_info().compilations - info.compilations
    _report.write_result(path, result)


def _resident() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def _peak() -> float:
    # Not getrusage: its maximum starts from that of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("found no VmHWM in /proc/self/status; this benchmark needs Linux")


def bench_memory(effort: Effort) -> None:
    compile_rows, rows, notes = [], [], []
    for (num_clients, rounds), side in itertools.product(effort.rounds.items(), (OURS, MAP_SCAN)):
        case = f"{num_clients} clients"
        try:
            found = _report.run_child(
                __file__,
                ["--child", "memory", side, str(num_clients), str(rounds)],
                effort.child_timeout,
            )
        except _report.ChildError as error:
            notes.append(f"{case}, {side}: not measured: {error}")
            continue
        compile_rows.append(
            {
                "case": case,
                "side": side,
                "first call - steady, s": f"{found['compile']:.2f}",
                "rounds": str(rounds),
                "programs": str(found.get("compilations", "")),
                "more in as many new cohorts": str(found.get("new compilations", "")),
            }
        )
        data = num_clients * NUM_BATCHES * BATCH_SIZE * (PIXELS + 1) * 4 / 1e6
        base = found["data"]
        rows.append(
            {
                "case": case,
                "side": side,
                "batches": f"{data:.0f}",
                "with imports": f"{found['imports']:.0f}",
                "peak above batches": f"+{found['peak'] - base:.0f}",
                "rounds": str(rounds),
                "after 5": f"+{found['after 5'] - base:.0f}",
                "after all": f"+{found['after all'] - base:.0f}",
            }
        )
        if "new after 5" in found:
            rows[-1] |= {
                "then as many new cohorts: 5": f"+{found['new after 5'] - base:.0f}",
                "all": f"+{found['new after all'] - base:.0f}",
                "peak": f"+{found['new peak'] - base:.0f}",
            }
    _report.print_table("Compile time (ours: with building the process)", compile_rows)
    _report.print_table(
        "Resident memory, MB (+: above imports and batches), fed with NumPy lists",
        [{key: row.get(key, "") for key in rows[0]} for row in rows],
        "\n".join(notes),
    )


# Where the time of a call goes.


def bench_overhead(effort: Effort, context) -> None:
    from helpers.federated import tff, transfer
    from helpers.federated.interruptible import Worker

    class NoContext(tff.framework.SyncContext):
        """Takes the argument as TFF packs it and does nothing."""

        argument = None

        def invoke(self, comp, arg):
            del comp
            self.argument = arg

    contexts, nothing, worker = tff.framework.get_context_stack(), NoContext(), Worker()

    def front_end(call):
        with contexts.install(nothing):
            return call()

    @tff.jax.computation(np.int32, np.int32)
    def add_numbers(x, y):
        return x + y

    jitted_add = jax.jit(lambda x, y: x + y)
    model, cohort = initial_model(), make_cohort(2)
    process = build_process()
    parameter = process.next.type_signature.parameter
    add, one_round = (
        functools.partial(add_numbers, 2, 3),
        functools.partial(process.next, model, cohort),
    )
    layout = transfer.ClientLayout(2, min(len(context.devices), 2))

    def ingestion(argument, type_spec, client_layout):
        transfer.cohort_size(argument, type_spec)
        return transfer.ingest(argument, type_spec, client_layout)

    front_end(add)
    add_argument, add_type = nothing.argument, add_numbers.type_signature.parameter
    front_end(one_round)
    round_argument = nothing.argument
    device_data = jax.device_put(stack(cohort))
    hop = functools.partial(worker.run, lambda: None)
    parts = {
        "add_numbers(2, 3)": {
            "whole call": add,
            "TFF packs the argument": functools.partial(front_end, add),
            "ingestion (checks, copy)": functools.partial(ingestion, add_argument, add_type, None),
            "hand-over to the worker thread": hop,
            "the same by jax.jit": lambda: int(jitted_add(2, 3)),
        },
        "round, 2 clients, lists": {
            "whole call": one_round,
            "TFF packs the argument": functools.partial(front_end, one_round),
            "ingestion (checks, copy)": functools.partial(
                ingestion, round_argument, parameter, layout
            ),
            "hand-over to the worker thread": hop,
            "the same by jax.jit": hand_written_call(flat_round, model, device_data=device_data),
        },
    }
    rows = []
    for case, functions in parts.items():
        times = _report.time_interleaved(functions, effort.overhead_seconds, max_turns=2000)
        medians = {name: float(np.median(values)) for name, values in times.items()}
        whole = medians["whole call"]
        medians["the rest"] = 2 * whole - sum(medians.values())
        for name, seconds in medians.items():
            rows.append(
                {
                    "call": case if name == "whole call" else "",
                    "part": name,
                    "ms": f"{seconds * 1e3:.3f}",
                    "share": f"{seconds / whole:.0%}",
                }
            )
    _report.print_table(
        "Where the time goes (medians)",
        rows,
        f"'the same by jax.jit' is the program alone, data on the device ('{FLAT}' for the round).",
    )


CHILDREN = {"native": native_child, "memory": memory_child}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute, rougher")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _report.exit_on_sigterm()
    if options.child:
        name, *arguments = options.child
        CHILDREN[name](*arguments)
        return
    effort = QUICK if options.quick else FULL
    packages = ("jax", "jaxlib", "tensorflow-federated", "tensorflow", "numpy")
    print(_report.machine_line(packages))
    print(
        "Times: median [quartiles] over turns. Ratios: median [quartiles] of the ratio turn by "
        "turn,\nand the ratio of the fastest calls."
    )
    context = use_our_context()
    bench_rounds(effort, context)
    bench_overhead(effort, context)
    bench_memory(effort)
    bench_native(effort)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
