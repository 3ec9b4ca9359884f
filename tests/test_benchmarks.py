"""What the benchmarks compare computes the same thing, and their tools measure what they say."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    # They are scripts, which find one another through the folder that they are run from.
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def report():
    import _report

    return _report


@pytest.mark.parametrize("name", ["map_scan_round", "flat_round"])
def test_hand_written_round_gives_our_model(name):
    import bench_federated

    from helpers import federated
    from helpers.federated import tff

    sizes = {"batch_size": 4, "pixels": 6}
    cohort = bench_federated.make_cohort(3, num_batches=2, **sizes)
    rng = np.random.default_rng(1)
    model = {
        field: rng.normal(size=array.shape).astype(np.float32)
        for field, array in bench_federated.initial_model(6).items()
    }
    context = federated.create_local_python_execution_context()
    with tff.framework.get_context_stack().install(context):
        ours = bench_federated.build_process(**sizes).next(model, cohort)
    theirs = getattr(bench_federated, name)(model, bench_federated.stack(cohort))
    for field in model:
        assert not np.array_equal(ours[field], model[field])
        np.testing.assert_allclose(ours[field], theirs[field], rtol=1e-5, atol=1e-6)


def test_functions_are_called_in_turns_with_changing_first(report):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = report.time_interleaved(functions, seconds=0, min_turns=2)
    assert "".join(calls) == "ab" + "ab" + "ba"  # once each untimed, then two turns
    assert [len(values) for values in times.values()] == [2, 2]


def test_ratio_is_the_median_of_the_turns_not_the_ratio_of_medians(report):
    times = {"x": np.array([2.0, 1.0, 9.0]), "y": np.array([1.0, 2.0, 3.0])}
    row = report.ratio_row("case", times, "x", "y", target=1.5)
    assert row["ratio"].startswith("2.00 ")
    assert row["target"] == "<= 1.5 missed"


def test_machine_line_does_not_name_the_host(report):
    assert os.uname().nodename not in report.machine_line(("numpy",))


def test_child_that_hangs_is_ended_with_what_it_started(report, tmp_path):
    pid_file = tmp_path / "pid"
    script = tmp_path / "hang.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    with pytest.raises(report.ChildError, match="timed out"):
        report.run_child(str(script), [str(pid_file)], timeout=4)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_child_that_fails_says_why(report, tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(report.ChildError, match="no such model"):
        report.run_child(str(script), [], timeout=60)


@pytest.mark.parametrize("name", ["batched", "autodiff", "plain"])
def test_matrix_factorization_references_have_our_gradient(name):
    import bench_matrix_factorization as bench
    import jax

    arguments = bench.make_data(30, 20, 3, num_chains=2)[:2]
    value, gradient = jax.jit(bench.ours)(*arguments)
    their_value, their_gradient = jax.jit(getattr(bench, name))(*arguments)
    for part, theirs in zip(gradient, their_gradient):
        np.testing.assert_allclose(part, theirs, rtol=1e-4, atol=1e-4)
    # `plain` leaves out constants, which differ between chains by nothing.
    np.testing.assert_allclose(np.diff(value), np.diff(their_value), rtol=1e-3, atol=1e-3)


def test_python_loop_gives_our_recommendations():
    import bench_recommend as bench

    from helpers import recommend

    draws, watched = bench.make_draws(40, 15, 30, 4)
    ours = recommend.recommend(draws, 3, watched[3], k=5)
    for loop in (bench.jax_loop, bench.numpy_loop):
        np.testing.assert_array_equal(loop(draws, 3, watched[3], 5), ours.counts)
    counts, first, probabilities = bench.full_loop(draws, 3, watched[3], 5)
    np.testing.assert_array_equal(counts, ours.counts)
    np.testing.assert_array_equal(first, ours.first.reshape(-1))
    np.testing.assert_allclose(probabilities, ours.probabilities, rtol=1e-5)
