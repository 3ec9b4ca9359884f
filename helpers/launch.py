r"""Runs a program in several JAX processes, or as one process of a cluster.

On one machine, over the loopback, on its CPU:

  python -m helpers.launch --processes 2 --devices-per-process 4 PROGRAM [ARGUMENT...]

On a cluster that JAX knows, once a host of a TPU pod slice, once a GPU (or a node of CPUs) under
Slurm or Open MPI:

  python -m helpers.launch PROGRAM [ARGUMENT...]

Elsewhere, once a process:

  python -m helpers.launch --coordinator-address HOST:PORT --num-processes N --process-id I \
    PROGRAM [ARGUMENT...]

PROGRAM is a module, such as helpers.programs.logistic_regression, or the path of a .py file. It is
run as `python -m` or `python` would run it, after `jax.distributed.initialize`: `jax.devices()` are
those of all processes, `jax.local_devices()` its own.

If one process ends with an error, is killed or hangs, all are ended, with a message. On one machine
that takes seconds, since this process watches the others. On a cluster JAX's heartbeats tell,
within half a minute on current JAX and two minutes on jax 0.4.30.
"""

import argparse
import contextlib
import inspect
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.devices import request_devices

HEARTBEAT_TIMEOUT = 30  # seconds
_START_TIMEOUT = 60  # seconds in which all processes must have found each other
_GRACE = 5.0  # seconds that the others have to end by themselves after one has ended
_INTERRUPT_GRACE = 30.0  # seconds that all have after Ctrl-C, to finish the chunk in work
_POLL = 0.1  # seconds
# jax 0.4.30's gloo makes the connections of a process' devices one after the other, and each waits
# for all others: with several devices a process it hangs. Goes with lane A.
_FIRST_JAX_WITH_SEVERAL_DEVICES = (0, 5)


class LaunchError(RuntimeError):
    """The processes cannot run, or one of them ended; the message says what to do."""


def launch(
    program: Sequence[str], num_processes: int, devices_per_process: int | None = None
) -> None:
    """Runs a program in several processes on this machine's CPU and waits for them.

    What process 0 prints goes through unchanged, what the others print has their number in front.

    Args:
      program: a module or the path of a .py file, and its arguments.
      num_processes: how many, at least 1.
      devices_per_process: CPU devices that each makes; JAX's own choice, 1, if None.

    Raises:
      ValueError: a number is not positive.
      LaunchError: a process ended with an error or was killed; the others have been ended.
      KeyboardInterrupt: Ctrl-C; all processes have ended.
    """
    for name, value in (("processes", num_processes), ("devices_per_process", devices_per_process)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, given {value}")
    address = f"127.0.0.1:{_free_port()}"
    with _started(program, address, num_processes, devices_per_process) as children:
        try:
            statuses = _wait(children)
        except KeyboardInterrupt:
            _signal(children, signal.SIGINT)
            _wait_for_all(children, _INTERRUPT_GRACE)
            raise
        if not any(statuses):
            return
        _wait_for_all(children, _GRACE)
    index = _first_cause(statuses)
    others = ", and the others were ended with it" if num_processes > 1 else ""
    raise LaunchError(
        f"process {index} of {num_processes} {_describe_status(statuses[index])}{others}; chunks "
        "that the program has saved are good, and the same command goes on from them"
    )


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    devices_per_process: int | None = None,
) -> None:
    """Makes this process one of several: starts JAX's distributed runtime.

    Args:
      coordinator_address: `host:port` of process 0; found out from the cluster if None, and so are
        the next two.
      num_processes: how many there are.
      process_id: which one this is.
      devices_per_process: CPU devices to make where there is no accelerator.

    Raises:
      LaunchError: there is no cluster that JAX knows, the others were not found within a minute, or
        this jaxlib cannot have several CPU devices a process.
    """
    import jax

    if devices_per_process is not None:
        request_devices(devices_per_process)
    several = (devices_per_process or 1) > 1 and (num_processes or 2) > 1
    if several and jax.version.__version_info__ < _FIRST_JAX_WITH_SEVERAL_DEVICES:
        raise LaunchError(
            f"jax {jax.__version__} hangs with several CPU devices a process; use "
            "--devices-per-process 1, or the environment of LANE=current"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options = {"initialization_timeout": _START_TIMEOUT}
    if "heartbeat_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        options["heartbeat_timeout_seconds"] = HEARTBEAT_TIMEOUT
    if coordinator_address and coordinator_address.startswith("127.0.0.1:"):
        options["coordinator_bind_address"] = coordinator_address  # Nobody else is let in.
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, **options)
    except (ValueError, RuntimeError) as error:
        raise LaunchError(
            f"JAX's distributed runtime did not start ({str(error).splitlines()[0]}); on one "
            "machine give --processes N; on a cluster that JAX does not know give "
            "--coordinator-address, --num-processes and --process-id"
        ) from error


@contextlib.contextmanager
def _started(
    program: Sequence[str], address: str, num_processes: int, devices_per_process: int | None
) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes, and makes sure that none outlives the block."""
    command = [sys.executable, "-m", "helpers.launch", "--watched"]
    command += ["--coordinator-address", address, "--num-processes", str(num_processes)]
    if devices_per_process is not None:
        command += ["--devices-per-process", str(devices_per_process)]
    children: list[subprocess.Popen] = []
    threads = []
    try:
        for index in range(num_processes):
            child = subprocess.Popen(
                [*command, "--process-id", str(index), *program],
                # A process ends when this pipe closes, so none is left if this one is killed.
                stdin=subprocess.PIPE,
                stdout=None if index == 0 else subprocess.PIPE,
                stderr=None if index == 0 else subprocess.STDOUT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,  # Ctrl-C goes to this process, which passes it on.
            )
            children.append(child)
            if index:
                thread = threading.Thread(target=_pass_on, args=(child.stdout, index), daemon=True)
                thread.start()
                threads.append(thread)
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            child.stdin.close()
        for thread in threads:
            thread.join(_GRACE)


def _pass_on(stream, index: int) -> None:
    for line in stream:
        sys.stderr.write(f"[process {index}] {line.decode(errors='replace')}")


def _wait(children: Sequence[subprocess.Popen]) -> list[int | None]:
    """Waits until all have ended well, or one has not.

    Returns:
      The exit status of each, None for one that still runs.
    """
    while True:
        statuses = [child.poll() for child in children]
        if any(statuses):
            # One that was killed is seen a moment after those that its death has ended: they lose
            # their connection to it before this process is told.
            time.sleep(_POLL)
            return [child.poll() for child in children]
        if all(status == 0 for status in statuses):
            return statuses
        time.sleep(_POLL)


def _first_cause(statuses: Sequence[int | None]) -> int:
    """Which process ended the run: one killed from outside, since the others then fail with it."""

    def rank(index: int) -> int:
        status = statuses[index]
        if not status:
            return 2
        # JAX's runtime aborts when it loses another process.
        return 0 if status < 0 and status != -signal.SIGABRT else 1

    return min(range(len(statuses)), key=rank)


def _wait_for_all(children: Sequence[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


def _signal(children: Sequence[subprocess.Popen], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _describe_status(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_launcher() -> None:
    """Ends this process when the one that started it is gone, however that ended."""

    def watch():
        # Not sys.stdin: Python would wait for its lock when it ends.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(program: Sequence[str]) -> None:
    """Runs a program in this process, as Python would run it."""
    name = program[0]
    sys.argv = list(program)
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_as_one_of_several(options: argparse.Namespace) -> None:
    """Runs the program and ends this process."""
    if options.watched:
        _end_with_launcher()
    status = 1
    try:
        join(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            options.devices_per_process,
        )
        _run(options.program)
        return
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
    except SystemExit as end:
        if end.code in (None, 0):
            return
        if isinstance(end.code, int):
            status = end.code
        else:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {interrupt}" if str(interrupt) else "interrupted", file=sys.stderr)
        status = 130
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: there JAX would wait minutes for processes that wait for this one.
    os._exit(status)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, help="start so many on this machine's CPU")
    parser.add_argument("--devices-per-process", type=int, help="CPU devices that each makes")
    parser.add_argument("--coordinator-address", help="host:port of process 0")
    parser.add_argument("--num-processes", type=int, help="of the cluster")
    parser.add_argument("--process-id", type=int, help="of this process, from 0")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a module or .py file, arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("name a program, such as helpers.programs.logistic_regression")
    cluster = (options.coordinator_address, options.num_processes, options.process_id)
    if options.processes is not None and any(value is not None for value in cluster):
        parser.error("--processes is for one machine; leave out what describes a cluster")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: the command line; None for that of the process.

    Returns:
      The exit status.
    """
    options = _parse(arguments)
    if options.processes is None:
        _run_as_one_of_several(options)
        return 0
    try:
        launch(options.program, options.processes, options.devices_per_process)
    except (LaunchError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the chunks saved", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
