"""What nbval leaves out when it compares an output with the stored one."""

import pytest
from nbval.plugin import IPyNbFile

# nbval's own list leaves out more (JPEG, widgets, the kind of an output). Of pictures, the pixels
# differ with the fonts and the processor; the text beside them and every number are compared.
SKIPPED = ("metadata", "traceback", "execution_count", "image/png")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, IPyNbFile):
        collector.skip_compare = SKIPPED
