"""The runtime in its surroundings: no processes, event loops, threads, interrupts."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers.federated import tff

HERE = Path(__file__).parent
add = tff.jax.computation(lambda x, y: x + y, np.int32, np.int32)


def test_no_process_is_started():
    before = set(psutil.Process().children(recursive=True))
    computation = tff.federated_computation(
        lambda x: tff.federated_sum(x), tff.FederatedType(np.int32, tff.CLIENTS)
    )
    assert computation([1, 2]) == 3
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_call_inside_a_running_event_loop():
    async def main():
        return add(2, 3)

    assert asyncio.run(main()) == 5


def test_a_call_from_another_thread(context):
    results = []

    def call():
        with tff.framework.get_context_stack().install(context):
            results.append(add(2, 3))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert results == [5]


def test_threads_share_a_context(context):
    results = []

    def call(n):
        with tff.framework.get_context_stack().install(context):
            results.append(add(n, n))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [2 * n for n in range(8)]
    assert context.cache_info().compilations == 1


@pytest.fixture
def start():
    """Starts interrupted.py and waits until its long call runs."""
    processes = []

    def start(mode):
        process = subprocess.Popen(
            [sys.executable, "interrupted.py", mode],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(1)  # Into the call; an interrupt that comes earlier would be a test of less.
        process.send_signal(signal.SIGINT)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_an_interrupt_ends_the_call_and_the_context_stays_usable(start):
    process = start("caught")
    output, errors = process.communicate(timeout=240)
    assert "interrupted after" in output, errors
    assert "usable: 1.0" in output
    assert process.returncode == 3, "the script's own exit status is lost"


def test_an_interrupt_that_nobody_catches_ends_the_process_at_once(start):
    process = start("uncaught")
    # The call would take two hours.
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.rstrip().endswith("KeyboardInterrupt")
