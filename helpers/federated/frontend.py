"""Which federated front end this process uses, and the few names the runtime needs from it.

That is tensorflow-federated where it is installed (lane A), else federated-language, TFF's core as
its maintainers carry it on (lane B). `tff` has the same names in both, and every other module of
`helpers.federated` takes types and building blocks from here.
"""

import importlib.util

from helpers.environment import check_environment

# One line now beats a long traceback from TensorFlow's imports later; it also silences TensorFlow.
check_environment()

# Who runs what the XLA runtime does not, for messages: TFF's own contexts.
NATIVE_CONTEXT = "tff.backends.native.set_sync_local_cpp_execution_context()"
TEST_CONTEXT = "tff.backends.test.set_sync_test_cpp_execution_context()"

if importlib.util.find_spec("tensorflow_federated") is not None:
    NAME = "tensorflow-federated"
    import tensorflow_federated as tff
else:
    NAME = "federated-language"
    # It has no context but the one of this package.
    NATIVE_CONTEXT += " of tensorflow-federated, under Python 3.11,"
    TEST_CONTEXT += " of tensorflow-federated, under Python 3.11,"
    from helpers.federated.language import tff

framework = tff.framework

CLIENTS = tff.CLIENTS
SERVER = tff.SERVER

FederatedType = tff.FederatedType
FunctionType = tff.FunctionType
SequenceType = tff.SequenceType
StructType = tff.StructType
TensorType = tff.TensorType
Type = tff.Type
TypedObject = tff.TypedObject

Struct = tff.structure.Struct
type_to_py_container = tff.types.type_to_py_container


def fields(struct) -> list[tuple[str | None, object]]:
    """Lists the fields of a struct value or a struct type in order.

    Args:
      struct: A `Struct` or `StructType`.

    Returns:
      `(name, field)` pairs; the name is None where the field has none.
    """
    return tff.structure.to_elements(struct)


def leaf_proto(block):
    """Returns the protocol buffer of a building block that is a leaf.

    Args:
      block: A `tff.framework.CompiledComputation`.
    """
    return block.proto if NAME == "tensorflow-federated" else block.to_proto()
