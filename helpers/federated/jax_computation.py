"""`tff.jax.computation` for federated-language, which comes without a JAX front end.

A Python function is traced by `jax.jit` for the types it is given. What is kept is its type and its
XLA program: a serialized `xla.HloModuleProto` with two bindings, which say where a tensor of the
argument stands among the program's parameters, and the same for the result. That is the form of
tensorflow-federated 0.87, whose wrapper of this name gives the same types and refuses the same
arguments.
"""

from collections.abc import Callable, Iterable, Iterator

import federated_language
import jax
import numpy as np
from federated_language import framework
from federated_language.common_libs import structure
from federated_language.proto import computation_pb2
from google.protobuf import any_pb2

from helpers.federated import jax_internals

_HLO_URL = "type.googleapis.com/xla.HloModuleProto"
_64_BITS = (np.int64, np.uint64, np.float64, np.complex128)


class _JaxContext(framework.SyncContext):
    """What is installed while JAX traces: a computation cannot be called from JAX code."""

    def invoke(self, comp, arg):
        del comp, arg
        raise NotImplementedError(
            "a computation cannot be called inside a JAX computation; call the plain JAX function, "
            "or compose the two in a tff.federated_computation"
        )


def _wrap(function: Callable, parameter_type, unpack: bool | None, name: str | None = None):
    """Traces a function; `ComputationWrapper` calls this once the parameter's type is known."""
    del name  # JAX names the module after the function.
    if parameter_type is not None:
        _check_type(parameter_type, parameter_type)
    size = len(list(_tensors(parameter_type)))
    args, kwargs = _bind(function, parameter_type, unpack, _shapes(parameter_type))
    # JAX may flatten the arguments in another order than the type's (a dict by its sorted keys):
    # the same arguments with numbers for tensors show which tensor becomes which parameter.
    numbers = jax.tree_util.tree_leaves(_bind(function, parameter_type, unpack, range(size)))
    _check_containers(numbers)

    with framework.get_context_stack().install(_JaxContext()):
        lowered = jax.jit(function, keep_unused=True).lower(*args, **kwargs)
    result_type, result_positions = _result(lowered.out_info)
    type_signature = federated_language.FunctionType(parameter_type, result_type)
    program = computation_pb2.Xla(
        hlo_module=any_pb2.Any(type_url=_HLO_URL, value=jax_internals.serialize_hlo(lowered)),
        result=_binding(result_type, iter(result_positions)),
    )
    if parameter_type is not None:
        positions = np.argsort(np.asarray(numbers, int)).tolist()
        program.parameter.CopyFrom(_binding(parameter_type, iter(positions)))
    return framework.ConcreteComputation(
        computation_proto=computation_pb2.Computation(type=type_signature.to_proto(), xla=program),
        context_stack=framework.get_context_stack(),
        annotated_type=type_signature,
    )


def _check_type(type_spec, whole) -> None:
    """Refuses what a JAX function cannot take; `whole` is the parameter's type, for messages."""
    if isinstance(type_spec, federated_language.StructType):
        for _, field in type_spec.items():
            _check_type(field, whole)
        return
    if not isinstance(type_spec, federated_language.TensorType):
        raise TypeError(
            f"a JAX computation takes tensors and structs of them, found {type_spec} in the "
            f"parameter type {whole}; sequences and placed values belong to a "
            "tff.federated_computation"
        )
    if type_spec.dtype.kind in "SUO":
        raise ValueError(f"JAX has no strings, found {type_spec} in the parameter type {whole}")
    if type_spec.shape is None or None in type_spec.shape:
        raise TypeError(
            f"JAX needs fully defined shapes, found {type_spec} in the parameter type {whole}"
        )
    if type_spec.dtype.type in _64_BITS and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{type_spec} in the parameter type {whole} needs 64-bit numbers, which JAX has "
            "switched off; call jax.config.update('jax_enable_x64', True) first, or use a 32-bit "
            "dtype"
        )


def _check_containers(numbers: list) -> None:
    for leaf in numbers:
        if not isinstance(leaf, int):
            raise TypeError(
                f"JAX cannot look into {type(leaf).__name__}, a container of the parameter type; "
                "register it with jax.tree_util.register_pytree_node"
            )


def _tensors(type_spec) -> Iterator:
    if isinstance(type_spec, federated_language.StructType):
        for _, field in type_spec.items():
            yield from _tensors(field)
    elif type_spec is not None:
        yield type_spec


def _shapes(type_spec) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in _tensors(type_spec)]


def _bind(function: Callable, parameter_type, unpack: bool | None, tensors: Iterable):
    """Arranges tensors as the positional and named arguments of a function.

    Args:
      function: The function.
      parameter_type: Type of its parameter, or None.
      unpack: Whether the fields of the parameter are the function's arguments, or None to tell by
        the function's signature.
      tensors: What stands for each tensor of the parameter, in the type's order.

    Returns:
      `(args, kwargs)`.
    """
    packed = _pack(parameter_type, iter(tensors)) if parameter_type is not None else None
    return framework.unpack_arg(function, parameter_type, packed, unpack)


def _pack(type_spec, tensors: Iterator):
    if isinstance(type_spec, federated_language.StructType):
        return structure.Struct([(name, _pack(part, tensors)) for name, part in type_spec.items()])
    return next(tensors)


def _result(shapes):
    """Reads the type of a result, and which of the program's results each tensor of it is."""
    result_type = federated_language.to_type(
        jax.tree_util.tree_map(
            lambda leaf: federated_language.TensorType(leaf.dtype, leaf.shape), shapes
        )
    )
    leaves, containers = jax.tree_util.tree_flatten(shapes)
    numbers = jax.tree_util.tree_unflatten(containers, range(len(leaves)))
    if isinstance(numbers, int):
        return result_type, [numbers]
    return result_type, structure.flatten(structure.from_container(numbers, recursive=True))


def _binding(type_spec, positions: Iterator[int]):
    """Builds the binding of a type from the position of each of its tensors, in order."""
    if isinstance(type_spec, federated_language.StructType):
        parts = [_binding(field, positions) for _, field in type_spec.items()]
        return computation_pb2.Xla.Binding(struct=computation_pb2.Xla.StructBinding(element=parts))
    return computation_pb2.Xla.Binding(
        tensor=computation_pb2.Xla.TensorBinding(index=next(positions))
    )


# A parameter whose type names no Python container reaches the function as a `Struct`.
jax.tree_util.register_pytree_node(
    structure.Struct,
    lambda struct: (tuple(struct), tuple(structure.name_list_with_nones(struct))),
    lambda names, parts: structure.Struct(list(zip(names, parts, strict=True))),
)

computation = framework.ComputationWrapper(_wrap)
computation.__doc__ = """Makes a computation of a JAX function, as a decorator or called with both.

`@tff.jax.computation(type, ...)` traces the function for the types of its arguments;
`@tff.jax.computation` alone does so for a function without arguments, and otherwise at each call
with arguments of new types.

Args:
  *args: The function, or the types of its arguments (anything `tff.to_type` takes), or both.

Returns:
  The computation, of type `(<name=type,...> -> result)`.

Raises:
  TypeError: A type is neither a tensor nor a struct of tensors, a shape is not fully defined, or
    the result is no struct of arrays.
  ValueError: A type holds a string, or a 64-bit dtype while JAX has 64-bit numbers switched off.
"""
