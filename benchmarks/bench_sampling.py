"""What chunks, progress and checkpoints cost against one uninterrupted `tfp.mcmc.sample_chain`.

Both run the same kernel on the same sharded data under `pmap`, compiled before the clock starts.
A chunk lasts about a second here. Saving one has a fixed cost (flushing a file to disk, whatever
the model), so it is timed by itself too, within the same calls.
"""

import argparse
import os
import tempfile
import time

# One device a core at most: forced host devices beyond the cores only add noise.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

import jax
import numpy as np
import tensorflow_probability.substrates.jax as tfp
from _report import machine_line, milliseconds, print_table, ratio_row, time_interleaved

from helpers.checkpoint import ChunkStore
from helpers.sampling import program as program_module
from helpers.sampling import run as run_module
from helpers.sampling.kernel_results import standard_trace

tfd, tfed = tfp.distributions, tfp.experimental.distribute
AXIS = "devices"
NUM_WARMUP, NUM_DRAWS, CHUNK_SIZE, NUM_LEAPFROGS = 100, 200, 100, 50
NUM_EXAMPLES, NUM_FEATURES = 4000, 128


def kernel_fn(features, labels):
    """Adapting HMC on a Bayesian logistic regression."""
    joint = tfed.JointDistributionSequential(
        [
            tfd.Sample(tfd.Normal(0.0, 1.0), NUM_FEATURES),
            lambda weights: tfed.Sharded(
                tfd.Independent(tfd.Bernoulli(logits=features @ weights), 1), AXIS
            ),
        ]
    )
    hmc = tfp.mcmc.HamiltonianMonteCarlo(
        lambda weights: joint.log_prob([weights, labels]), 0.01, NUM_LEAPFROGS
    )
    return tfp.mcmc.DualAveragingStepSizeAdaptation(hmc, int(0.8 * NUM_WARMUP))


def make_data():
    """Features `[num_devices, num_examples, dim]` and labels `[num_devices, num_examples]`."""
    rng = np.random.default_rng(0)
    num_devices = jax.local_device_count()
    shape = (num_devices, NUM_EXAMPLES // num_devices, NUM_FEATURES)
    features = rng.normal(size=shape).astype(np.float32)
    labels = (features[..., 0] + rng.normal(size=shape[:2]) > 0).astype(np.float32)
    return jax.pmap(lambda *leaves: leaves)(features, labels)


def make_sample_chain(data, start):
    """One program for the whole run, with the same trace."""

    def run(key, start, features, labels):
        kernel = kernel_fn(features, labels)
        return tfp.mcmc.sample_chain(
            NUM_DRAWS,
            start,
            kernel=kernel,
            num_burnin_steps=NUM_WARMUP,
            trace_fn=lambda _, results: standard_trace(kernel, results),
            seed=key,
        )

    compiled = jax.pmap(run, axis_name=AXIS, in_axes=(None, None, 0, 0))
    key = jax.random.PRNGKey(0)

    def call():
        states, trace = compiled(key, start, *data)
        return np.asarray(states[0]), jax.tree_util.tree_map(np.asarray, trace)

    return call


class TimedStore(ChunkStore):
    """Notes the seconds of each save."""

    def __init__(self, directory, fingerprint, seconds):
        super().__init__(directory, fingerprint)
        self._seconds = seconds

    def save(self, chunk):
        begin = time.perf_counter()
        super().save(chunk)
        self._seconds.append(time.perf_counter() - begin)


def make_chunked(data, start, folder, *, progress, save, seconds):
    """The steps of `sampling.sample`, without compiling again in each call."""
    layout = program_module.make_layout(
        start, None, devices=jax.local_devices(), axis_name=AXIS, independent_chains=False
    )
    program = program_module.Program(
        kernel_fn, None, layout, start, data, seed=0, thin=1, chunk_size=CHUNK_SIZE
    )
    program.compile()
    first = program.carry_to_host()
    fingerprint = program.fingerprint()

    def call():
        program.restore(first)
        host = run_module.HostDraws(NUM_WARMUP, NUM_DRAWS, 1)
        store = None
        if save:
            store = TimedStore(tempfile.mkdtemp(dir=folder), fingerprint, seconds)
        run_module.take_steps(program, host, store, 0, CHUNK_SIZE, progress)
        return host

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    arguments = parser.parse_args()
    print(machine_line(("jax", "jaxlib", "numpy")))
    data, start = make_data(), np.zeros(NUM_FEATURES, np.float32)
    saves = []
    with tempfile.TemporaryDirectory() as folder:
        functions = {"sample_chain": make_sample_chain(data, start)}
        for name, options in {
            "chunks": {"progress": False, "save": False},
            "chunks, progress": {"progress": True, "save": False},
            "chunks, progress, checkpoints": {"progress": True, "save": True},
        }.items():
            functions[name] = make_chunked(data, start, folder, seconds=saves, **options)
        times = time_interleaved(functions, arguments.seconds)
    names = list(functions)[1:]
    rows = [ratio_row(name, times, name, "sample_chain", 1.03) for name in names]
    num_chunks = (NUM_WARMUP + NUM_DRAWS) // CHUNK_SIZE
    chunk_seconds = times[names[-1]] / num_chunks
    print_table(
        f"Logistic regression, {NUM_EXAMPLES} x {NUM_FEATURES}, {NUM_WARMUP} + {NUM_DRAWS} steps "
        f"of {NUM_LEAPFROGS} leapfrogs, chunks of {CHUNK_SIZE} ({np.median(chunk_seconds):.2g} s), "
        f"{jax.local_device_count()} device(s)",
        rows,
        "Both sides are compiled before; sample_chain's draws are moved to the host too.\n"
        f"One save: {milliseconds(np.asarray(saves))} ms, "
        f"{np.median(saves) / np.median(chunk_seconds):.1%} of a chunk",
    )


if __name__ == "__main__":
    main()
