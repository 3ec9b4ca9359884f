"""Waits for work in C++ in a way that Ctrl-C and the notebook's stop button can end.

XLA's CPU client runs a program inside the call that starts it, and Python handles a signal only
when the main thread is back in Python. So the main thread hands the call to a helper thread and
waits on a lock, which a signal does interrupt. XLA has no way to cancel a program: an abandoned one
runs to its end in the background, and its result is dropped.
"""

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_abandoned: list[threading.Thread] = []


class Worker:
    """Runs calls one after another on a thread of its own."""

    def __init__(self):
        self._calls: queue.SimpleQueue | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], _T]) -> _T:
        """Runs a call and returns its result.

        Args:
          call: Function without arguments.

        Returns:
          What the call returns.

        Raises:
          KeyboardInterrupt: The main thread was interrupted while it waited.
          Exception: Whatever the call raises.
        """
        if threading.current_thread() is not threading.main_thread():
            return call()  # Signals reach the main thread only: nothing to wait for here.
        outcome = _Outcome()
        try:
            if self._calls is None:
                self._start()
            self._calls.put((call, outcome))
            outcome.done.acquire()
        except BaseException:
            # The thread may be busy for long: leave it to end by itself and start afresh.
            self._abandon()
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _start(self) -> None:
        self._calls = queue.SimpleQueue()
        # A daemon, since a thread that waits for calls must not keep the interpreter from ending.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name="tff-xla-worker", daemon=True
        )
        self._thread.start()
        # Without this the thread of a context that is no longer used would wait for ever.
        weakref.finalize(self, self._calls.put, None).atexit = False

    def _abandon(self) -> None:
        calls, thread = self._calls, self._thread
        self._calls = self._thread = None
        if calls is None or thread is None:
            return
        calls.put(None)
        if not _abandoned:
            atexit.register(_leave)
        _abandoned[:] = [kept for kept in _abandoned if kept.is_alive()] + [thread]


class _Outcome:
    def __init__(self):
        self.done = threading.Lock()
        self.done.acquire()
        self.value = None
        self.error: BaseException | None = None


def _serve(calls: queue.SimpleQueue) -> None:
    while (item := calls.get()) is not None:
        call, outcome = item
        try:
            outcome.value = call()
        except BaseException as error:  # It is raised again in the thread that waits.
            outcome.error = error
        outcome.done.release()
        # The next call may be far away: do not keep the arguments and the result alive.
        del item, call, outcome


def _leave() -> None:
    """Ends the interpreter safely while an abandoned program still runs.

    JAX takes XLA down at exit, and a program that runs meanwhile crashes the process. After an
    interrupt that nobody caught the process ends at once; otherwise it waits, so that its exit
    status is the one the script asked for, and a further Ctrl-C ends it.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        _end_now()
    try:
        for thread in _abandoned:
            thread.join(timeout=1)
            if thread.is_alive():
                print(
                    "Waiting for an interrupted XLA program to end; Ctrl-C leaves at once.",
                    file=sys.stderr,
                    flush=True,
                )
                thread.join()
    except KeyboardInterrupt:
        _end_now()


def _end_now() -> None:
    if not any(thread.is_alive() for thread in _abandoned):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # A closed stream has nothing to lose.
            stream.flush()
    os._exit(130)  # 128 + SIGINT, what a shell reports for Ctrl-C.
