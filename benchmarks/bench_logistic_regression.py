"""A leapfrog step of the logistic regression: our density against autodiff and against a hand.

`python benchmarks/bench_logistic_regression.py [--quick]`. Each number of devices runs in a process
of its own, because XLA reads its flags once. Within a process what is compared is called in turns.
"""

import argparse
import functools
import os
import sys
from pathlib import Path

import _report
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # helpers, from the tree

DIM, CLASSES = 784, 10
REFERENCE = "by hand, 1 device"
STEPS = 10  # leapfrogs a call
PREPARATION = "ours, preparation alone"
ALL_CASES = ["ours", "blocks of 250", "uint8, blocks of 250", "TFP by autodiff"]
QUICK_CASES = ["ours", "TFP by autodiff"]
TARGETS = {"one": 1.1, "cores": 1.3, "many": 1.5}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8,000 examples only, fewer turns")
    parser.add_argument("--child", nargs=4, metavar=("EXAMPLES", "SECONDS", "DEVICES", "CASES"))
    parser.add_argument("output", nargs="?")
    options = parser.parse_args()
    if options.child:
        num_examples, seconds, num_devices, cases = options.child
        times = measure(int(num_examples), float(seconds), int(num_devices), cases.split(";"))
        times = {name: values.tolist() for name, values in times.items()}
        _report.write_result(options.output, times)
        return
    _report.exit_on_sigterm()
    print(_report.machine_line(("jax", "jaxlib", "numpy", "tensorflow-probability")))
    report(options.quick)


def report(quick):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    counts = {"one": 1, "cores": cores, "many": 8}
    if cores in (1, 8):
        counts = {"one": 1, "many": 8}
    sizes = (8000,) if quick else (8000, 60000)
    for num_examples in sizes:
        rows, preparations = [], []
        for label, num_devices in counts.items():
            cases = ALL_CASES
            if quick:  # Most of the time goes into TFP's import: once is enough.
                cases = QUICK_CASES if num_devices == 1 else ["ours"]
            times = child(num_examples, 1 if quick else 10, num_devices, cases)
            if not times:
                continue
            preparation = times.pop(PREPARATION)
            preparations.append(f"{_report.milliseconds(preparation)} on {num_devices}")
            for name in cases:
                target = TARGETS[label] if name == "ours" else None
                case = f"{num_devices} devices, {name}"
                rows.append(_report.ratio_row(case, times, name, REFERENCE, target))
        _report.print_table(
            f"{STEPS} leapfrog steps, {num_examples} x {DIM}, {CLASSES} classes, strong scaling",
            rows,
            f"Ratios to the hand-written loop on the first device of the same process, which may "
            f"use all {cores} cores. What ours prepares once a call (a transposed copy) is off: "
            f"ms {', '.join(preparations)} devices.",
        )
    if not quick:
        weak(counts.values())
    _report.print_table("Collectives a leapfrog step and device, computed", collective_rows())


def weak(counts):
    rows = []
    for num_devices in counts:
        times = child(2000 * num_devices, 4, num_devices, ["ours"])
        if times:
            row = _report.ratio_row(
                f"{num_devices} devices, {2000 * num_devices} examples", times, "ours", REFERENCE
            )
            rows.append(row)
    _report.print_table("Weak scaling: 2000 examples a device", rows)


def collective_rows():
    parameters = (DIM + 1) * CLASSES
    rows = []
    for chains in (1, 4):
        size = 4 * chains * (parameters + 1)
        rows += [
            {
                "chains": chains,
                "devices": num_devices,
                "psum operand, bytes": size,
                # A ring all-reduce sends 2 (n - 1) / n of the operand from each device.
                "sent by each in a ring, bytes": round(2 * size * (num_devices - 1) / num_devices),
                "hops in a ring": 2 * (num_devices - 1),
            }
            for num_devices in (1, 2, 8, 256, 4096)
        ]
    return rows


def child(num_examples, seconds, num_devices, cases):
    arguments = ["--child", str(num_examples), str(seconds), str(num_devices), ";".join(cases)]
    try:
        times = _report.run_child(str(Path(__file__).resolve()), arguments, timeout=120)
    except _report.ChildError as error:
        print(f"{num_devices} devices, {num_examples} examples: no result: {error}")
        return None
    return {name: np.asarray(values) for name, values in times.items()}


def measure(num_examples, seconds, num_devices, cases):
    from helpers.devices import request_devices

    request_devices(num_devices)
    import jax
    import jax.numpy as jnp
    from jax import lax

    from helpers import sharding
    from helpers.models.logistic_regression import make_joint_distribution, make_log_density

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (num_examples, DIM)).astype(np.uint8)
    scaled = pixels * np.float32(1 / 255)
    labels = rng.integers(0, CLASSES, num_examples).astype(np.int32)

    def leapfrogs(value_and_grad, steps, weights, bias):
        def step(_, state):
            position, momentum, value = state
            value, gradient = value_and_grad(*position)
            momentum = [m + 1e-4 * g for m, g in zip(momentum, gradient)]
            position = [p + 1e-4 * m for p, m in zip(position, momentum)]
            return position, momentum, value

        start = [weights, bias]
        zeros = [jnp.zeros_like(x) for x in start]
        return lax.fori_loop(0, steps, step, (start, zeros, jnp.float32(0)))

    def by_hand(steps, images, labels, weights, bias, transposed):
        def value_and_grad(weights, bias):
            logits = images @ weights + bias
            logits = logits - logits.max(1, keepdims=True)
            exponentials = jnp.exp(logits)
            normalizers = exponentials.sum(1, keepdims=True)
            one_hot = (labels[:, None] == jnp.arange(CLASSES)).astype(jnp.float32)
            value = (logits * one_hot).sum() - jnp.log(normalizers).sum()
            residual = one_hot - exponentials / normalizers
            value -= 0.5 * ((weights**2).sum() + (bias**2).sum())
            return value, (transposed @ residual - weights, residual.sum(0) - bias)

        return leapfrogs(value_and_grad, steps, weights, bias)

    def ours(steps, images, labels, weights, bias, **options):
        density = make_log_density(images, labels, axis_name="data", **options)
        return leapfrogs(jax.value_and_grad(density, (0, 1)), steps, weights, bias)

    def autodiff(steps, images, labels, weights, bias):
        joint = make_joint_distribution(images, CLASSES, axis_name="data")
        density = jax.value_and_grad(lambda w, b: joint.log_prob((w, b, labels)), (0, 1))
        return leapfrogs(density, steps, weights, bias)

    start = jnp.zeros((DIM, CLASSES)), jnp.zeros(CLASSES)
    one = [jnp.asarray(x) for x in (scaled, labels)]
    transposed = jnp.asarray(np.ascontiguousarray(scaled.T))
    hand = jax.jit(by_hand)
    calls = {REFERENCE: lambda: jax.block_until_ready(hand(STEPS, *one, *start, transposed))}
    sharded = sharding.shard((scaled, labels), num_devices)
    compact = sharding.shard((pixels, labels), num_devices)
    implementations = {
        "ours": (ours, sharded, {}),
        "blocks of 250": (ours, sharded, {"block_size": 250}),
        "uint8, blocks of 250": (ours, compact, {"block_size": 250}),
        "TFP by autodiff": (autodiff, sharded, {}),
    }
    for name, (function, data, options) in implementations.items():
        if name not in cases:
            continue

        def body(steps, images, labels, weights, bias, function=function, options=options):
            return function(steps, images, labels, weights, bias, **options)

        mapped = jax.pmap(body, axis_name="data", in_axes=(None, 0, 0, None, None))

        def call(steps=STEPS, mapped=mapped, data=data):
            return jax.block_until_ready(mapped(steps, *data, *start))

        calls[name] = call
        if name == "ours":
            # The number of steps is an argument, so XLA cannot drop what no step would use.
            calls[PREPARATION] = functools.partial(call, 0)
    times = _report.time_interleaved(calls, seconds, min_turns=3)
    # A sampler calls the density some thousand times for each time that it prepares it.
    times["ours"] = times["ours"] - np.median(times[PREPARATION])
    return times


if __name__ == "__main__":
    main()
