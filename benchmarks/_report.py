"""What the benchmarks share: the machine, interleaved timing, tables of ratios, child processes.

The machine may be busy with other work. So what is compared is called in turns, and the ratio is
taken turn by turn: a slow second hits both sides.
"""

import contextlib
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import psutil

_ROOT = Path(__file__).resolve().parent.parent
_TAIL = 300  # characters of a failed child's stderr that are worth showing


class ChildError(RuntimeError):
    """A child process gave no result; the message is the reason in one line."""


def machine_line(packages: Sequence[str] = ("jax", "jaxlib", "numpy")) -> str:
    """Describes the machine in one line, without its name.

    Args:
      packages: Installed distributions whose versions matter.

    Returns:
      Processor model, cores this process may use, memory, load, versions.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return (
        f"machine: {_cpu_model()}, {cores} of {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {versions}"
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    min_turns: int = 5,
    max_turns: int = 400,
) -> dict[str, np.ndarray]:
    """Times functions in turns: A B C, B C A, C A B, ...

    Each is called once untimed before. Who goes first changes from turn to turn, so that nobody
    always finds the caches as the same other one left them.

    Args:
      functions: What to call, by name. A call must end only when its result is there.
      seconds: Stop after the turn in which this much time has passed.
      min_turns: But take at least this many.
      max_turns: And at most this many.

    Returns:
      For each name the seconds of each turn, float64 `[num_turns]`.

    Raises:
      ValueError: There is nothing to call, or fewer than one turn is asked for.
    """
    if not functions or not 1 <= min_turns <= max_turns:
        raise ValueError(
            "expected functions and 1 <= min_turns <= max_turns, given "
            f"{len(functions)} functions, min_turns={min_turns}, max_turns={max_turns}"
        )
    names = list(functions)
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # As timeit does: a collection would hit one side by chance.
    try:
        end = time.perf_counter() + seconds
        for turn in range(max_turns):
            if turn >= min_turns and time.perf_counter() >= end:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                start = time.perf_counter()
                functions[name]()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return {name: np.asarray(values) for name, values in times.items()}


def milliseconds(seconds: np.ndarray) -> str:
    """Formats times as `median [quartile-quartile]` in milliseconds."""
    low, middle, high = np.percentile(seconds, (25, 50, 75)) * 1e3
    return f"{middle:.3g} [{low:.3g}-{high:.3g}]"


def ratio_row(
    case: str,
    times: Mapping[str, np.ndarray],
    ours: str,
    reference: str,
    target: float | None = None,
) -> dict[str, str]:
    """Compares two of the timed functions in one row of a table.

    Args:
      case: What was measured.
      times: From `time_interleaved`.
      ours: Name of the one judged.
      reference: Name of the one it is judged by.
      target: Largest ratio wished for, or None.

    Returns:
      Columns and their text. `ratio` is the median over turns of ours / reference with its
      quartiles, `of minima` the ratio of the fastest calls.
    """
    turns = times[ours] / times[reference]
    low, middle, high = np.percentile(turns, (25, 50, 75))
    verdict = ""
    if target is not None:
        verdict = f"<= {target:g} {'met' if middle <= target else 'missed'}"
    return {
        "case": case,
        "ours, ms": milliseconds(times[ours]),
        "against": reference,
        "its ms": milliseconds(times[reference]),
        "ratio": f"{middle:.2f} [{low:.2f}-{high:.2f}]",
        "of minima": f"{times[ours].min() / times[reference].min():.2f}",
        "target": verdict,
        "turns": str(len(turns)),
    }


def print_table(title: str, rows: Sequence[Mapping[str, object]], note: str = "") -> None:
    """Prints rows as a table under a title, at once."""
    print(f"\n{title}")
    if rows:
        print(pd.DataFrame(rows).to_string(index=False))
    if note:
        print(note)
    sys.stdout.flush()


def run_child(script: str, arguments: Sequence[str], timeout: float) -> dict:
    """Runs a script in a session of its own and returns the JSON object that it writes.

    The script is called with `arguments` and, last, the path of the file to write. Its standard
    streams are files: a process that it leaves behind can hold no pipe of ours. Whatever happens,
    every process of it has ended on return.

    Args:
      script: Path of the Python script.
      arguments: Its arguments but the last.
      timeout: Seconds it may take.

    Returns:
      What the script wrote.

    Raises:
      ChildError: It failed, timed out or wrote nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "result.json"), Path(folder, "log")
        # helpers.processes finds descendants even when they leave the session.
        command = [sys.executable, "-m", "helpers.processes", sys.executable, script]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, *arguments, str(output)],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"timed out after {timeout:g} s") from error
        finally:
            _end_session(process)
        # Processes that had to be killed afterwards make the status 1; the result stands.
        if not output.exists():
            reason = log.read_text(errors="replace").strip()[-_TAIL:].replace("\n", " ")
            raise ChildError(f"exit status {process.returncode}: {reason or 'no message'}")
        return json.loads(output.read_text())


def write_result(path: str, result: Mapping[str, object]) -> None:
    """Writes a child's result for `run_child`; a file that is there is whole."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def _end_session(leader: subprocess.Popen) -> None:
    """Ends the leader of a session, who sweeps its descendants, then all that is left of it."""
    members = _session(leader.pid)
    if leader.poll() is None:
        leader.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(15)
    members = {*members, *_session(leader.pid)}
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # psutil checks that the id is still the same process.
    psutil.wait_procs(members, timeout=5)
    leader.wait()


def _session(session_id: int) -> set[psutil.Process]:
    """Lists a session's processes and their descendants, which may have left it."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session_id:
                found |= {process, *process.children(recursive=True)}
    return found


def exit_on_sigterm() -> None:
    """Makes SIGTERM end Python as an exit does, so that children are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
