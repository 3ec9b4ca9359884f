"""Several processes: the same draws, one that dies, and what is left of a run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers import environment, launch

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "helpers.programs.logistic_regression"
# jax 0.4.30 cannot have several devices a process.
DEVICES = 1 if environment.lane() == "tff" else 4
OPTIONS = ["--chains", "2", "--warmup", "20", "--leapfrogs", "5", "--chunk-size", "10"]
OPTIONS += ["--step-size", "0.005"]
TOO_LONG = 60  # seconds in which a run must end after one of its processes has


def start(*arguments, **variables):
    hidden = ("XLA_FLAGS", "JAX_PLATFORMS")
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={name: value for name, value in os.environ.items() if name not in hidden} | variables,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(*arguments):
    return start(
        "helpers.launch", "--processes", "2", "--devices-per-process", str(DEVICES), *arguments
    )


def finish(process, seconds=300):
    """Exit status and what was printed; ends a run that hangs."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"did not end within {seconds} s: {process.communicate()[0]}")
    return process.returncode, output


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"did not come so far: {process.communicate()[0]}")
        time.sleep(0.05)


def children(process):
    found = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        found, key=lambda child: int(child.cmdline()[child.cmdline().index("--process-id") + 1])
    )


def have_chunks(folder, count):
    return all(
        len(list(folder.glob(f"process-{index}-of-2/chunk-*.sha256"))) >= count for index in (0, 1)
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Draws of one process with as many devices."""
    path = tmp_path_factory.mktemp("one") / "draws.npz"
    arguments = ["--devices", str(2 * DEVICES), "--draws", "150", "--output", str(path)]
    status, output = finish(start(PROGRAM, *OPTIONS, *arguments))
    assert status == 0, output
    return np.load(path)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of two processes of which one was killed: its folder, exit status, seconds, output."""
    folder = tmp_path_factory.mktemp("killed")
    run = start_two(PROGRAM, *OPTIONS, "--draws", "150", "--checkpoint-dir", str(folder))
    wait_for(lambda: have_chunks(folder, 3), run)
    both = children(run)
    began = time.monotonic()
    both[1].kill()
    status, output = finish(run, 2 * TOO_LONG)
    return folder, status, time.monotonic() - began, output, both


def test_a_killed_process_ends_the_run_with_a_message(killed):
    _, status, seconds, output, both = killed
    assert status == 1
    assert seconds < TOO_LONG
    last = output.strip().splitlines()[-1]
    assert "error: process 1 of 2 was killed by SIGKILL" in output, output
    assert "the same command goes on" in last
    assert not any(child.is_running() for child in both)


def test_a_restart_goes_on_and_gives_the_draws_of_one_process(killed, one_process, tmp_path):
    folder = killed[0]
    path = tmp_path / "draws.npz"
    arguments = ["--draws", "150", "--checkpoint-dir", str(folder), "--output", str(path)]
    # As if process 1 had died before it saved its last chunk.
    max((folder / "process-1-of-2").glob("chunk-*")).unlink()
    left = len(list((folder / "process-1-of-2").glob("chunk-*.sha256")))
    status, output = finish(start_two(PROGRAM, *OPTIONS, *arguments))
    assert status == 0, output
    assert f"170 steps, {10 * left} of them from the checkpoint" in output
    assert f"{2 * DEVICES} cpu devices ({DEVICES} in this process)" in output
    draws = np.load(path)
    for name in ("weights", "bias"):
        np.testing.assert_array_equal(draws[name], one_process[name])
    assert np.ptp(draws["weights"], axis=0).min() > 0


def test_chunks_of_two_processes_are_refused_by_one(killed):
    arguments = ["--draws", "150", "--checkpoint-dir", str(killed[0]), "--devices", "2"]
    status, output = finish(start(PROGRAM, *OPTIONS, *arguments))
    assert status == 1
    assert "holds chunks of 2 processes, and this run has 1; start as many" in output
    assert "Traceback" not in output


def test_ctrl_c_ends_all_and_leaves_good_chunks(tmp_path):
    run = start_two(PROGRAM, *OPTIONS, "--draws", "100000", "--checkpoint-dir", str(tmp_path))
    wait_for(lambda: have_chunks(tmp_path, 1), run)
    both = children(run)
    run.send_signal(signal.SIGINT)
    status, output = finish(run, 2 * TOO_LONG)
    assert status == 130, output
    assert "interrupted; the same command goes on" in output
    assert not any(child.is_running() for child in both)
    assert not list(tmp_path.rglob("*.partial"))


WAITING = """
import jax, pathlib, sys
pathlib.Path(sys.argv[1], str(jax.process_index())).touch()
if jax.process_index() == 1 and sys.argv[2] == "raise":
    raise ArithmeticError("what went wrong")
from jax.experimental import multihost_utils
while True:
    multihost_utils.process_allgather(1)
"""


@pytest.fixture
def waiting(tmp_path):
    """A program whose processes wait for each other."""
    path = tmp_path / "program.py"
    path.write_text(WAITING)
    return path, tmp_path


def test_an_exception_in_one_process_ends_all_and_is_shown(waiting):
    path, folder = waiting
    status, output = finish(start_two(str(path), str(folder), "raise"), 2 * TOO_LONG)
    assert status == 1
    assert "[process 1] ArithmeticError: what went wrong" in output
    assert "process 1 of 2 ended with exit status 1" in output


def test_no_process_outlives_a_launcher_that_is_killed(waiting):
    path, folder = waiting
    run = start_two(str(path), str(folder), "wait")
    wait_for(lambda: (folder / "0").exists() and (folder / "1").exists(), run)
    both = children(run)
    run.kill()
    run.communicate()
    _, alive = psutil.wait_procs(both, timeout=20)
    assert len(both) == 2
    assert alive == []


@pytest.mark.parametrize(
    ("name", "numbers"), [("processes", (0, None)), ("devices_per_process", (2, 0))]
)
def test_numbers_must_be_positive(name, numbers):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, given 0"):
        launch.launch(["x"], *numbers)


def test_program_must_be_named(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--processes", "2"])
    assert "name a program, such as helpers.programs" in capsys.readouterr().err


def test_one_machine_or_a_cluster(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--processes", "2", "--process-id", "0", "x"])
    assert "--processes is for one machine" in capsys.readouterr().err


def test_without_a_cluster_the_message_says_what_to_give():
    status, output = finish(start("helpers.launch", PROGRAM))
    assert status == 1
    assert "on one machine give --processes N" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("statuses", "first"),
    [
        ([1, 0], 0),
        ([0, 1], 1),
        ([None, 1, 1], 1),
        ([1, -signal.SIGKILL], 1),
        ([-signal.SIGABRT, -signal.SIGSEGV], 1),
        ([None, -signal.SIGABRT], 1),
    ],
)
def test_the_process_that_was_killed_is_named_rather_than_those_that_miss_it(statuses, first):
    assert launch._first_cause(statuses) == first


def test_a_folder_for_the_draws_that_is_missing_is_told_before_sampling(tmp_path):
    path = tmp_path / "no" / "draws.npz"
    status, output = finish(start(PROGRAM, *OPTIONS, "--output", str(path)))
    assert status == 1
    assert f"--output {path}: there is no folder {path.parent}; make it first" in output
    assert "Traceback" not in output


def test_tasks_of_slurm_find_each_other(tmp_path):
    # What srun would set, of two tasks on this machine.
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    path = tmp_path / "program.py"
    path.write_text(
        "import jax; print(jax.process_index(), jax.process_count(), len(jax.devices()))"
    )
    tasks = [
        start("helpers.launch", str(path), **slurm, SLURM_PROCID=str(task), SLURM_LOCALID=str(task))
        for task in range(2)
    ]
    for task, process in enumerate(tasks):
        status, output = finish(process, 2 * TOO_LONG)
        assert status == 0, output
        assert f"{task} 2 2" in output


@pytest.mark.skipif(environment.lane() == "current", reason="of jax 0.4.30")
def test_several_devices_a_process_are_refused_where_they_hang():
    arguments = ["--processes", "2", "--devices-per-process", "2", PROGRAM]
    status, output = finish(start("helpers.launch", *arguments), TOO_LONG)
    assert status == 1
    assert "hangs with several CPU devices a process; use --devices-per-process 1" in output
