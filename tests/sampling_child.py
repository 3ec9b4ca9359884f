"""What test_sampling.py runs in a process of its own: with three devices, and to be killed.

`python sampling_child.py FOLDER` writes each scenario's result there. Importing TFP takes long, so
one process does all; the runs that are killed are forks of it from before JAX starts.
"""

import os
import pickle
import random
import signal
import sys
import time
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_probability.substrates.jax as tfp

from helpers import sampling

tfd, tfed = tfp.distributions, tfp.experimental.distribute

# These programs run for less time than XLA would take to optimize them.
CONFIGURATION = {"jax_threefry_partitionable": True, "jax_disable_most_optimizations": True}
NUM_DEVICES = 3
NUM_EXAMPLES = 40
NOISE = 2.0


def adapting(log_density, num_adaptation_steps, step_size=0.1, num_leapfrog_steps=4):
    hmc = tfp.mcmc.HamiltonianMonteCarlo(log_density, step_size, num_leapfrog_steps)
    return tfp.mcmc.DualAveragingStepSizeAdaptation(hmc, num_adaptation_steps)


def normal_kernel():
    """HMC on a standard normal distribution in the plane; quick to compile."""
    return tfp.mcmc.HamiltonianMonteCarlo(lambda x: -0.5 * jnp.sum(x**2, -1), 0.1, 4)


# A run to be killed: chunks by device, thinned, through warm-up and draws.
KILLED = {
    "kernel_fn": normal_kernel,
    "initial_state": np.ones((NUM_DEVICES, 2, 2), np.float32),
    "num_draws": 150,
    "num_warmup": 50,
    "seed": 7,
    "axis_name": "devices",
    "independent_chains": True,
    "thin": 2,
    "chunk_size": 10,
    "progress": False,
}
# The beginning of a run on one device, to be continued by a process with another hash seed.
CONTINUED = {
    **KILLED,
    "initial_state": np.ones((1, 2, 2), np.float32),
    "num_draws": 20,
}


def gaussian_data():
    """Observations `[NUM_DEVICES, NUM_EXAMPLES, 2]` around (1, -2)."""
    rng = np.random.default_rng(1)
    values = rng.normal([1.0, -2.0], NOISE, (NUM_DEVICES, NUM_EXAMPLES, 2))
    return values.astype(np.float32)


def gaussian_kernel(observations):
    """Unknown mean, known variance: the posterior is known."""
    joint = tfed.JointDistributionSequential(
        [
            tfd.Sample(tfd.Normal(0.0, 1.0), 2),
            lambda mean: tfed.Sharded(
                tfd.Independent(
                    tfd.Normal(mean[..., None, :] + jnp.zeros((NUM_EXAMPLES, 1)), NOISE), 2
                ),
                "devices",
            ),
        ]
    )
    return adapting(lambda mean: joint.log_prob([mean, observations]), 160)


def sharded_latents_kernel():
    """A variable that all devices share, and one a device whose mean it is."""
    joint = tfed.JointDistributionSequential(
        [tfd.Normal(0.0, 1.0), lambda v: tfed.Sharded(tfd.Normal(v, 1.0), "devices")]
    )
    return tfp.mcmc.HamiltonianMonteCarlo(
        lambda v, u: joint.log_prob([v, u]), 0.5, 3
    ).experimental_with_shard_axes([[], ["devices"]])


def forgotten_sum_kernel(observations):
    """Each device looks at its own data only."""
    return tfp.mcmc.HamiltonianMonteCarlo(
        lambda mean: -0.5 * jnp.sum((observations - mean[..., None, :]) ** 2, (-1, -2)), 0.01, 2
    )


def main(folder):
    write(folder, "killed", killed_at_random(folder / "killed-chunks"))
    run = {"num_warmup": 200, "seed": 3, "axis_name": "devices", "progress": False}
    start = np.zeros((2, 2), np.float32)
    data = (gaussian_data(),)
    write(folder, "gaussian", sampling.sample(gaussian_kernel, start, data, num_draws=1000, **run))
    write(
        folder,
        "sharded_latents",
        sampling.sample(
            sharded_latents_kernel,
            [np.zeros(2, np.float32), np.zeros((NUM_DEVICES, 2), np.float32)],
            replicated=[True, False],
            num_draws=30,
            **{**run, "num_warmup": 0},
        ),
    )
    write(
        folder,
        "forgotten_sum",
        message_of(lambda: sampling.sample(forgotten_sum_kernel, start, data, num_draws=5, **run)),
    )
    sampling.sample(**CONTINUED, checkpoint_dir=folder / "continued", devices=jax.devices()[:1])


def message_of(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return None


def killed_at_random(chunks, num_kills=3):
    """Kills a run again and again, then lets it end, and makes it once without."""
    choose = random.Random(0)
    saved = []
    for _ in range(num_kills):
        already = count(chunks)
        process = fork(lambda: sampling.sample(**KILLED, checkpoint_dir=chunks))
        # After some chunks more, and then at any moment of computing or writing the next.
        wanted = already + choose.randint(1, 6)
        end = time.monotonic() + 120
        while count(chunks) < wanted and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(choose.uniform(0, 0.02))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        saved.append(count(chunks))
    results = {}
    for name, options in {"resumed": {"checkpoint_dir": chunks}, "whole": {}}.items():
        path = chunks.parent / f"{name}.pickle"
        process = fork(
            lambda path=path, options=options: path.write_bytes(
                pickle.dumps(sampling.sample(**KILLED, **options))
            )
        )
        os.waitpid(process, 0)
        results[name] = pickle.loads(path.read_bytes())
    return {"chunks after each kill": saved, **results}


def count(chunks):
    return sum(path.name.endswith(".sha256") for path in chunks.glob("*"))


def fork(function):
    process = os.fork()
    if process:
        return process
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def write(folder, name, result):
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    for name, value in CONFIGURATION.items():
        jax.config.update(name, value)
    main(Path(sys.argv[1]))
