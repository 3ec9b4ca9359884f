r"""Samples notebook 4's Bayesian logistic regression of digits, over the devices of all processes.

In one process, and in several:

  python -m helpers.programs.logistic_regression --devices 8
  python -m helpers.launch --processes 2 --devices-per-process 4 \
    helpers.programs.logistic_regression

Both give the same draws, to the bit on the same kind of processor.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers import data, sampling, sharding
from helpers.checkpoint import CheckpointError
from helpers.data.errors import DataError
from helpers.devices import describe_devices, request_devices
from helpers.environment import UnfitEnvironmentError, check_environment
from helpers.notebooks import write_atomically


def run(options: argparse.Namespace) -> sampling.Draws:
    """Loads the digits and samples.

    Args:
      options: as `parse` returns them.

    Returns:
      The draws; weights `[num_draws, num_chains, dim, classes]`, bias `[num_draws, num_chains,
      classes]`, the same in every process.
    """
    import jax
    import jax.numpy as jnp
    from tensorflow_probability.substrates import jax as tfp

    from helpers.models import logistic_regression

    jax.config.update("jax_threefry_partitionable", True)
    digits = data.load_mnist(source=options.data_source)
    _tell(describe_devices())
    _tell(digits)
    images = digits.train_images.reshape(len(digits.train_images), -1)
    shares, mask = sharding.shard((images, digits.train_labels), pad=True, unit="images")

    def make_kernel(images, labels, mask):
        log_density = logistic_regression.make_log_density(
            images,
            labels,
            mask,
            axis_name="devices",
            pixel_max=digits.pixel_max,
            ordered_sum=True,  # The same draws however the devices are spread over processes.
        )
        hmc = tfp.mcmc.HamiltonianMonteCarlo(log_density, options.step_size, options.leapfrogs)
        return tfp.mcmc.DualAveragingStepSizeAdaptation(hmc, options.warmup // 2)

    shape = (options.chains, images.shape[1], digits.num_classes)
    with jax.default_matmul_precision("float32"):
        return sampling.sample(
            make_kernel,
            [jnp.zeros(shape), jnp.zeros((options.chains, digits.num_classes))],
            data=(*shares, mask),
            num_draws=options.draws,
            num_warmup=options.warmup,
            seed=options.seed,
            axis_name="devices",
            chunk_size=options.chunk_size,
            checkpoint_dir=options.checkpoint_dir,
        )


def report(draws: sampling.Draws) -> None:
    """Prints how a run went, from process 0.

    Args:
      draws: of the run.
    """
    info = draws.info
    found = sampling.diagnose(draws.states[0])
    _tell(
        f"{info.num_steps} steps, {info.num_loaded_steps} of them from the checkpoint; compiled in "
        f"{info.compile_seconds:.1f} s, sampled in {info.seconds:.0f} s, "
        f"{info.leapfrogs_per_second:,.0f} leapfrogs a second on {info.num_devices} devices"
    )
    _tell(
        f"largest R-hat {np.max(found.r_hat):.2f}, smallest bulk effective sample size "
        f"{np.min(found.ess_bulk):.0f}, {draws.num_divergences} divergent trajectories"
    )


def save(draws: sampling.Draws, path: Path) -> None:
    """Writes the draws, from process 0, in one step.

    Args:
      draws: of the run.
      path: a file for NumPy's `load`, with `weights` and `bias`.
    """
    import io

    import jax

    if jax.process_index() == 0:
        buffer = io.BytesIO()
        np.savez(buffer, weights=draws.states[0], bias=draws.states[1])
        write_atomically(path, buffer.getvalue())


def _tell(message: Any) -> None:
    import jax

    if jax.process_index() == 0:
        print(message, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
      arguments: the command line; None for that of the process.

    Returns:
      The options.
    """
    parser = argparse.ArgumentParser(
        prog="helpers.programs.logistic_regression",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = functools.partial(parser.add_argument, type=int)
    add("--devices", help="CPU devices to make, where no launcher does")
    add("--chains", default=4)
    add("--warmup", default=500, help="steps; the step size adapts in the first half")
    add("--draws", default=500, help="a chain")
    add("--leapfrogs", default=30, help="a trajectory; published: 100")
    add("--chunk-size", default=100, help="steps between two savings")
    add("--seed", default=0)
    parser.add_argument("--step-size", type=float, default=0.01, help="to start from")
    parser.add_argument("--data-source", default="bundled", help="bundled, archive or tfds")
    parser.add_argument("--checkpoint-dir", help="folder to save chunks in and to go on from")
    parser.add_argument("--output", type=Path, help="file for the draws, .npz")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: the command line; None for that of the process.

    Returns:
      The exit status.
    """
    options = parse(arguments)
    folder = None if options.output is None else options.output.resolve().parent
    try:
        check_environment()
        if folder is not None and not folder.is_dir():
            raise ValueError(
                f"--output {options.output}: there is no folder {folder}; make it first"
            )
        if options.devices is not None:
            request_devices(options.devices)
        draws = run(options)
    except (CheckpointError, DataError, UnfitEnvironmentError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(draws)
    if options.output is not None:
        save(draws, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
