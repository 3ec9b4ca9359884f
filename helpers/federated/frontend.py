"""Which federated front end this process uses, and the few names the runtime needs from it.

Every other module of `helpers.federated` takes TFF's types and building blocks from here, so that
the front end can be another one (TFF's successor, federated-language) without touching them.
"""

import os

from helpers.environment import check_environment

# One line now beats a long traceback from TensorFlow's imports later.
check_environment()

# TensorFlow writes start-up notes to stderr, which a notebook would store as output and nbval would
# compare. The level must be set before the import. A reader's own setting stays, except for 1,
# which is what `import jax` sets where there is none.
if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow_federated as tff  # noqa: E402

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

NAME = "tensorflow-federated"


def fields(struct) -> list[tuple[str | None, object]]:
    """Lists the fields of a struct value or a struct type in order.

    Args:
      struct: A `Struct` or `StructType`.

    Returns:
      `(name, field)` pairs; the name is None where the field has none.
    """
    return tff.structure.to_elements(struct)
