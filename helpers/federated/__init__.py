"""Runs JAX computations inside TensorFlow Federated again.

    from helpers import federated
    from helpers.federated import tff

    federated.set_local_python_execution_context()

    @tff.jax.computation(np.int32, np.int32)
    def add_numbers(x, y):
        return x + y

    add_numbers(2, 3)  # 5

`context` is the door, `evaluate` walks TFF's building blocks, `hlo` runs a leaf, `averaging` holds
the standard API. `tff` is tensorflow-federated where it is installed, else federated-language under
the same names (`frontend`, `language`) with a JAX front end of ours (`jax_computation`). Importing
this package imports one or the other; the first brings in TensorFlow.
"""

from helpers.federated.averaging import build_jax_federated_averaging_process
from helpers.federated.context import (
    CacheInfo,
    UnsupportedTypeError,
    XlaExecutionContext,
    create_local_python_execution_context,
    set_local_python_execution_context,
)
from helpers.federated.evaluate import NoClientsError, UnsupportedIntrinsicError
from helpers.federated.frontend import tff
from helpers.federated.hlo import UnsupportedLeafError, hlo_text
from helpers.federated.transfer import DeviceValue

__all__ = [
    "CacheInfo",
    "DeviceValue",
    "NoClientsError",
    "UnsupportedIntrinsicError",
    "UnsupportedLeafError",
    "UnsupportedTypeError",
    "XlaExecutionContext",
    "build_jax_federated_averaging_process",
    "create_local_python_execution_context",
    "hlo_text",
    "set_local_python_execution_context",
    "tff",
]
