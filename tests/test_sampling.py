import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_child
import tensorflow_probability.substrates.jax as tfp

from helpers import sampling
from helpers.checkpoint import CheckpointError, ChunkStore, DamagedChunkWarning
from helpers.sampling import run as run_module

START = np.ones((1, 2, 2), np.float32)
RUN = {
    "num_draws": 30,
    "num_warmup": 20,
    "seed": 5,
    "axis_name": "devices",
    "independent_chains": True,
    "chunk_size": 10,
    "progress": False,
    "trace_fn": lambda state, _: {"norm": jnp.sum(state**2, -1)},
}


@pytest.fixture(autouse=True, scope="module")
def _configuration_of_the_child():
    before = {
        "jax_threefry_partitionable": jax.config.jax_threefry_partitionable,
        "jax_disable_most_optimizations": False,  # this one cannot be read in JAX 0.4.30
    }
    for name, value in sampling_child.CONFIGURATION.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def normal(x):
    return -0.5 * jnp.sum(x**2, -1)


def adapting_kernel():
    return sampling_child.adapting(normal, 16)


def plain_kernel():
    return tfp.mcmc.HamiltonianMonteCarlo(normal, 0.1, 2)


def sample(kernel_fn=adapting_kernel, start=START, **options):
    return sampling.sample(kernel_fn, start, **{**RUN, "devices": jax.devices()[:1], **options})


def assert_same_bits(first, second):
    for name in ("states", "trace", "warmup_trace"):
        jax.tree_util.tree_map(
            np.testing.assert_array_equal, getattr(first, name), getattr(second, name)
        )


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """The folder with the results of sampling_child.py."""
    folder = tmp_path_factory.mktemp("child")
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, sampling_child.__file__, str(folder)]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], timeout=400, check=True)
    return folder


def result(child, name):
    return pickle.loads((child / f"{name}.pickle").read_bytes())


@pytest.fixture(scope="module")
def whole_run():
    """A run that nothing interrupted."""
    return sample()


# --- exact resume


def test_a_run_killed_at_random_moments_gives_the_draws_of_a_whole_one(child):
    killed = result(child, "killed")
    assert_same_bits(killed["resumed"], killed["whole"])


def test_each_kill_left_more_chunks_than_the_one_before(child):
    saved = result(child, "killed")["chunks after each kill"]
    assert saved == sorted(set(saved))
    assert saved[0] > 0


def test_another_process_goes_on_from_saved_chunks_to_more_draws(child):
    options = {**sampling_child.CONTINUED, "num_draws": 40, "devices": jax.devices()[:1]}
    continued = sampling.sample(**options, checkpoint_dir=child / "continued")
    assert continued.info.num_loaded_steps == 90
    assert_same_bits(continued, sampling.sample(**options))


def test_the_chunk_size_does_not_change_the_draws():
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        assert_same_bits(sample(plain_kernel, chunk_size=7), sample(plain_kernel))
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def test_thinning_keeps_the_last_of_so_many_steps(whole_run):
    thinned = sample(num_draws=15, thin=2)
    np.testing.assert_array_equal(thinned.states, whole_run.states[1::2])
    np.testing.assert_array_equal(thinned.trace["acceptance"], whole_run.trace["acceptance"])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of the chunks of a finished run."""
    folder = tmp_path_factory.mktemp("chunks")
    sample(checkpoint_dir=folder)
    return folder


def test_a_damaged_chunk_is_made_again(whole_run, saved_run, tmp_path):
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    path = max(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(DamagedChunkWarning, match=path.name):
        again = sample(checkpoint_dir=tmp_path)
    assert again.info.num_loaded_steps == 40
    assert_same_bits(again, whole_run)


@pytest.mark.parametrize(
    ("difference", "options"),
    [
        ("seed: saved 5, given 6", {"seed": 6}),
        ("program", {"kernel_fn": lambda: sampling_child.adapting(lambda x: -jnp.sum(x, -1), 16)}),
        ("kernel settings", {"kernel_fn": lambda: sampling_child.adapting(normal, 15)}),
        ("program", {"start": np.ones((1, 3, 2), np.float32)}),
        ("initial state", {"start": 2 * START}),
    ],
    ids=["seed", "model", "kernel settings", "shapes", "initial state"],
)
def test_chunks_of_another_run_are_refused(saved_run, difference, options):
    with pytest.raises(CheckpointError, match=difference):
        sample(checkpoint_dir=saved_run, **options)


def test_ctrl_c_in_the_middle_of_adaptation_leaves_good_chunks_and_says_how_to_resume(
    whole_run, tmp_path, monkeypatch
):
    save, calls = ChunkStore.save, []

    def interrupted_save(self, chunk):
        calls.append(chunk)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        save(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkStore, "save", interrupted_save)
        with pytest.raises(sampling.SamplingInterrupted, match=r"after 10 of 50 steps.*same call"):
            sample(checkpoint_dir=tmp_path)
    resumed = sample(checkpoint_dir=tmp_path)
    assert resumed.info.num_loaded_steps == 10
    assert_same_bits(resumed, whole_run)


# --- right draws


def test_a_sharded_conjugate_gaussian_has_its_exact_posterior(child):
    draws = result(child, "gaussian").states
    observations = sampling_child.gaussian_data().astype(np.float64).reshape(-1, 2)
    precision = 1 + len(observations) / sampling_child.NOISE**2
    mean = observations.sum(axis=0) / sampling_child.NOISE**2 / precision
    diagnostics = sampling.diagnose(draws)
    assert (abs(draws.mean(axis=(0, 1)) - mean) < 4 * diagnostics.mcse_mean).all()
    error = abs(draws.std(axis=(0, 1)) - precision**-0.5)
    assert (error < 4 * diagnostics.mcse_sd).all()


def test_what_is_replicated_is_returned_once(child):
    assert result(child, "gaussian").states.shape == (1000, 2, 2)
    shared, sharded = result(child, "sharded_latents").states
    assert shared.shape == (30, 2)
    assert sharded.shape == (30, sampling_child.NUM_DEVICES, 2)


def test_a_sharded_part_moves_differently_on_each_device(child):
    _, sharded = result(child, "sharded_latents").states
    last = sharded[-1].ravel()
    assert len(np.unique(last)) == len(last)


def test_independent_chains_differ_by_device(child):
    last = result(child, "killed")["whole"].states[-1].ravel()
    assert len(np.unique(last)) == last.size == 12


def test_devices_that_disagree_about_a_replicated_state_are_an_error(child):
    message = result(child, "forgotten_sum")
    assert "not the same on all 3 devices: initial_state, " in message
    assert "psum" in message


# --- adaptation and step sizes


@pytest.mark.parametrize("num_adaptation_steps", [0, 20])
def test_adaptation_must_end_before_warmup(num_adaptation_steps):
    with pytest.raises(ValueError, match=r"must end before warm-up does.* = 16"):
        sample(lambda: sampling_child.adapting(normal, num_adaptation_steps))


def test_simple_adaptation_is_checked_too():
    def kernel_fn():
        hmc = tfp.mcmc.HamiltonianMonteCarlo(normal, 0.1, 2)
        return tfp.mcmc.SimpleStepSizeAdaptation(hmc, 20)

    with pytest.raises(ValueError, match="num_adaptation_steps=20 of num_warmup=20"):
        sample(kernel_fn)


# The two chains sample normals of very different scales, so they need different step sizes.
def two_scales_kernel(shared):
    scales = jnp.array([[0.01], [1.0]])
    step_size = sampling.initial_step_size(0.01, START[0], shared=shared)
    return sampling_child.adapting(lambda x: normal(x / scales), 16, step_size)


def test_a_shared_step_size_is_one_for_all_chains():
    draws = sample(lambda: two_scales_kernel(shared=True))
    assert draws.trace["step_size"].shape == (30, 1)


def test_chains_with_their_own_step_size_adapt_apart():
    step_size = sample(lambda: two_scales_kernel(shared=False)).trace["step_size"]
    assert step_size.shape == (30, 1, 2)
    assert step_size[-1, 0, 1] > 5 * step_size[-1, 0, 0]


def test_the_step_size_stands_still_after_warmup(whole_run):
    assert len(np.unique(whole_run.warmup_trace["step_size"])) > 10
    assert len(np.unique(whole_run.trace["step_size"])) == 1


def test_initial_step_size_has_a_shape_for_each_part():
    state = [jnp.zeros((4, 3, 2)), jnp.zeros(4)]
    shapes = [size.shape for size in sampling.initial_step_size(0.1, state, shared=False)]
    assert shapes == [(4, 1, 1), (4,)]
    assert sampling.initial_step_size(0.1, state, shared=True).shape == ()


def test_initial_step_size_refuses_parts_with_other_chains():
    with pytest.raises(ValueError, match="same leading"):
        sampling.initial_step_size(0.1, [jnp.zeros((4, 3)), jnp.zeros(3)], shared=False)


# --- the trace


def test_the_trace_is_what_the_kernel_saw(whole_run):
    np.testing.assert_allclose(
        whole_run.trace["log_density"], normal(whole_run.states), rtol=1e-5, atol=1e-6
    )
    assert (whole_run.trace["num_leapfrogs"] == 4).all()


def test_the_trace_does_not_evaluate_the_log_density_again():
    calls = []

    def counted(x):
        jax.debug.callback(lambda: calls.append(1))
        return normal(x)

    sample(lambda: tfp.mcmc.HamiltonianMonteCarlo(counted, 0.1, 3))
    jax.effects_barrier()
    assert len(calls) == 1 + 3 * 50  # once at the start, then once a leapfrog step


def test_every_trajectory_of_an_unstable_integrator_diverges():
    # Leapfrog steps of more than twice the scale grow without bound.
    draws = sample(lambda: tfp.mcmc.HamiltonianMonteCarlo(normal, 3.0, 20))
    assert draws.num_divergences == 30 * 2


def test_no_trajectory_of_a_stable_integrator_diverges(child):
    assert result(child, "gaussian").num_divergences == 0


def test_nuts_runs_and_its_leapfrogs_are_counted():
    draws = sample(lambda: tfp.mcmc.NoUTurnSampler(normal, 0.4))
    assert draws.trace["num_leapfrogs"].shape == (30, 1, 2)
    assert draws.num_divergences == 0
    assert draws.info.leapfrogs_per_second > 0


def test_trace_fn_adds_to_the_trace(whole_run):
    norm = (whole_run.states**2).sum(-1)
    np.testing.assert_allclose(whole_run.trace["norm"], norm, rtol=1e-5)
    assert whole_run.warmup_trace["norm"].shape == (20, 1, 2)


def test_trace_fn_cannot_replace_a_standard_quantity():
    with pytest.raises(ValueError, match=r"'log_density'.*other names"):
        sample(trace_fn=lambda *_: {"log_density": 0.0})


# --- progress and memory


def test_the_progress_bar_shows_how_the_sampler_does(capsys):
    sample(plain_kernel, progress=True)
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("50/50", "acceptance=", "step size=", "leapfrogs/s="))


def test_no_progress_bar_writes_nothing(capfd):
    sample(plain_kernel, progress=False)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_device_memory_is_bounded_by_the_chunk(monkeypatch):
    chunk_size, num_values, sizes = 10, 5000, []
    update = run_module.tqdm.update

    def measure(self, n):
        sizes.append(sum(array.nbytes for array in jax.live_arrays()))
        update(self, n)

    before = sum(array.nbytes for array in jax.live_arrays())
    monkeypatch.setattr(run_module.tqdm, "update", measure)
    draws = sample(
        lambda: tfp.mcmc.HamiltonianMonteCarlo(normal, 0.1, 1),
        np.zeros((1, 2, num_values), np.float32),
        num_draws=200,
        chunk_size=chunk_size,
    )
    one_draw = draws.states[0].nbytes
    assert len(sizes) == 22  # chunks
    # The state and a dozen arrays of its size in the kernel's results, and the chunk's draws.
    assert max(sizes) - before < (20 + chunk_size) * one_draw


# --- arguments


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_draws must be at least 1, given 0", {"num_draws": 0}),
        ("num_warmup must be at least 0, given -1", {"num_warmup": -1}),
        ("give chunk_size=12", {"thin": 3}),
        ("contradicts independent_chains", {"replicated": True}),
        (
            r"initial_state of shape \(2, 2\) is not spread over 1 devices",
            {"start": np.zeros((2, 2), np.float32)},
        ),
        (r"data\[0\] of shape \(3, 2\) is not spread over 1", {"data": (np.zeros((3, 2)),)}),
        ("structure of initial_state", {"replicated": [False, True]}),
    ],
)
def test_bad_arguments_are_named(message, options):
    with pytest.raises(ValueError, match=message):
        sample(**options)


# --- diagnostics


@pytest.fixture(scope="module")
def white_noise():
    """Independent draws `[1000, 4, 2]` with means (1, -3) and scales (1, 0.1)."""
    return np.random.default_rng(0).normal([1.0, -3.0], [1.0, 0.1], (1000, 4, 2))


def test_independent_draws_count_fully(white_noise):
    diagnostics = sampling.diagnose(white_noise)
    np.testing.assert_allclose(diagnostics.ess_bulk, 4000, rtol=0.15)
    np.testing.assert_allclose(diagnostics.r_hat, 1, atol=0.005)
    np.testing.assert_allclose(diagnostics.mcse_mean, [1 / 4000**0.5, 0.1 / 4000**0.5], rtol=0.1)


def test_repeated_draws_do_not_count(white_noise):
    repeated = np.repeat(white_noise, 5, axis=0)
    np.testing.assert_allclose(sampling.diagnose(repeated).ess_bulk, 4000, rtol=0.15)


def test_a_chain_elsewhere_raises_r_hat(white_noise):
    shifted = white_noise + np.array([0.0, 0.0, 0.0, 5.0])[:, None]
    assert (sampling.diagnose(shifted).r_hat > 1.3).all()


def test_a_single_chain_has_no_r_hat_and_arviz_is_not_asked(white_noise, monkeypatch):
    monkeypatch.delattr("arviz.rhat")  # It would log a warning, which a notebook would store.
    diagnostics = sampling.diagnose(white_noise[:, :1])
    assert np.isnan(diagnostics.r_hat).all()
    assert diagnostics.r_hat.shape == (2,)
    np.testing.assert_allclose(diagnostics.ess_bulk, 1000, rtol=0.3)


def test_rounding_leaves_no_negative_zero(white_noise):
    centred = white_noise - white_noise.mean((0, 1)) - 1e-6
    means = sampling.summarize({"a": centred}, round_to_mcse=True)["mean"]
    assert [str(mean) for mean in means] == ["0.0", "0.0"]


def test_device_and_chain_axes_are_chains_alike(white_noise):
    split = white_noise.reshape(1000, 2, 2, 2)
    np.testing.assert_array_equal(
        sampling.diagnose(split, num_chain_axes=2).r_hat, sampling.diagnose(white_noise).r_hat
    )


def test_summary_has_a_row_a_scalar(white_noise):
    table = sampling.summarize({"a": white_noise, "b": white_noise[..., 0]})
    assert list(table.index) == ["a[0]", "a[1]", "b"]
    np.testing.assert_allclose(table.loc["a[1]", "mean"], white_noise[..., 1].mean())
    np.testing.assert_allclose(table.loc["b", "q95"], np.quantile(white_noise[..., 0], 0.95))


def test_rounded_summary_shows_no_digit_below_the_monte_carlo_error(white_noise):
    table = sampling.summarize({"a": white_noise}, round_to_mcse=True)
    # Errors are about 0.016 and 0.0016, so units are 0.1 and 0.01.
    assert table.loc["a[0]", "mean"] == 1.0
    assert table.loc["a[1]", "mean"] == -3.0
    assert table.loc["a[1]", "sd"] == 0.1
    assert table.loc["a[0]", "ess_bulk"] == 4000


def test_too_few_axes_for_diagnostics_are_named():
    with pytest.raises(ValueError, match=r"shape \(10,\).*num_chain_axes=1"):
        sampling.diagnose(np.zeros(10))
