"""The few places where the runtime uses JAX below its public API, for jax 0.4.30 and 0.12.

Each function is the smallest thing that differs between JAX releases; nothing else in
`helpers.federated` imports `jax._src`, `jax.lib` or `jaxlib`. The branches for 0.4.30 go when lane
A does, the rest when JAX offers "call this StableHLO" in public.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func, hlo
from jax.extend.core import Primitive

_JAX_0_4 = jax.__version_info__ < (0, 5)  # Lane A.

if _JAX_0_4:
    from jax.experimental import enable_x64
else:
    from jax import enable_x64

__all__ = [
    "HloModule",
    "Primitive",
    "call_stablehlo",
    "enable_x64",
    "hlo_text",
    "read_hlo_module",
    "register_lowering",
    "serialize_hlo",
]

register_lowering = mlir.register_lowering


@dataclasses.dataclass(frozen=True)
class HloModule:
    """What the runtime needs of an HLO module.

    Attributes:
      name: The module's name.
      stablehlo: The same program as StableHLO, text or bytecode, its entry function called `main`.
      results: Shape and dtype of each array that the entry computation returns, in order.
    """

    name: str
    stablehlo: str | bytes
    results: tuple[jax.ShapeDtypeStruct, ...]


def read_hlo_module(serialized: bytes) -> HloModule:
    """Parses a serialized `xla.HloModuleProto` and translates it to StableHLO."""
    computation = xla_client.XlaComputation(serialized)
    shape = computation.program_shape().result_shape()
    if _JAX_0_4:
        stablehlo = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    else:
        stablehlo = xla_client._xla.mlir.hlo_to_stablehlo(serialized)
    return HloModule(
        name=computation.get_hlo_module().name,
        stablehlo=stablehlo,
        results=tuple(_flat_results(shape)),
    )


def serialize_hlo(lowered: jax.stages.Lowered) -> bytes:
    """Returns the program of a lowered function as a serialized `xla.HloModuleProto`."""
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def hlo_text(serialized: bytes) -> str:
    """Returns a serialized `xla.HloModuleProto` as text."""
    return xla_client.XlaComputation(serialized).as_hlo_text()


def _flat_results(shape):
    if shape.is_tuple():
        for part in shape.tuple_shapes():
            yield from _flat_results(part)
    else:
        yield jax.ShapeDtypeStruct(shape.dimensions(), np.dtype(shape.numpy_dtype()))


def call_stablehlo(ctx, name: str, stablehlo: str | bytes, arguments: Sequence) -> Sequence:
    """Merges a StableHLO module into the one being lowered and calls its `main`.

    Args:
      ctx: The lowering rule's context.
      name: Wished-for name of the merged function.
      stablehlo: Text or bytecode of the module.
      arguments: One IR value a parameter.

    Returns:
      One IR value for each array returned.
    """
    module = ir.Module.parse(stablehlo, context=ctx.module_context.context)
    main = ir.SymbolTable(module.operation)["main"]
    result_types = main.type.results
    function = mlir.merge_mlir_modules(ctx.module_context.module, name, module)
    call = func.CallOp(result_types, ir.FlatSymbolRefAttr.get(function), arguments)
    # A computation with several results returns them as one tuple in HLO; jax 0.4.30 keeps that.
    results = []
    for value in call.results:
        results.extend(_untuple(value))
    return results


def _untuple(value):
    if not isinstance(value.type, ir.TupleType):
        return [value]
    parts = []
    for index in range(ir.TupleType(value.type).num_types):
        parts.extend(_untuple(hlo.get_tuple_element(value, index)))
    return parts
