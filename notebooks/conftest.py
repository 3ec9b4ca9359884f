"""What nbval leaves out when it compares an output with the stored one, and how long it waits."""

import time
from queue import Empty

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbFile

# nbval's own list leaves out more (JPEG, widgets, the kind of an output). Of pictures, the pixels
# differ with the fonts and the processor; the text beside them and every number are compared.
SKIPPED = ("metadata", "traceback", "execution_count", "image/png")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, IPyNbFile):
        collector.skip_compare = SKIPPED


_get_message = RunningKernel.get_message


def _get_message_while_alive(self: RunningKernel, stream: str, timeout: float | None = None):
    """Waits for a message in short slices, since nbval does not notice that a kernel has died."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = 1.0 if end is None else min(1.0, end - time.monotonic())
        try:
            return _get_message(self, stream, timeout=max(left, 0.01))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel has died in this cell") from None
            if end is not None and time.monotonic() >= end:
                raise


RunningKernel.get_message = _get_message_while_alive
