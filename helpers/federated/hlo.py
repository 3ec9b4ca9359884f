"""Runs a leaf: the HLO module that TFF serialized for one `tff.jax.computation`.

TFF keeps a traced JAX function as an `xla.HloModuleProto` with two bindings that say which tensor
of the TFF argument is which HLO parameter, and the same for the result. A `Leaf` turns the module
into StableHLO and calls it through a JAX primitive, so the leaf can stand inside any `jax.jit`: XLA
then sees one program and fuses across the call. The Python function behind the leaf is not needed,
which is why a computation that was serialized and loaded again runs as well.

Merging a StableHLO module into the one being lowered is what `jax.export` does for a call of an
exported function; here the module comes from TFF instead.
"""

import functools
from collections.abc import Sequence

import jax
from jax.core import ShapedArray

from helpers.federated import frontend, jax_internals

# Custom calls by which JAX calls back into Python. Their operand is the address of a Python object
# of the process that traced them, which nothing keeps alive once TFF has serialized the module.
_CALLBACK_TARGETS = (b"python_cpu_callback", b"python_gpu_callback", b"python_tpu_callback")


class UnsupportedLeafError(NotImplementedError):
    """A leaf of the computation is not an XLA computation that this runtime can run."""


class Leaf:
    """One compiled leaf of a computation, callable on JAX arrays under any transformation of jit.

    Attributes:
      name: Name of the HLO module (`jit_` and the Python function's name), for messages.
    """

    def __init__(self, serialized_module: bytes):
        """Reads an HLO module.

        Args:
          serialized_module: A serialized `xla.HloModuleProto`.

        Raises:
          UnsupportedLeafError: The module calls back into Python.
        """
        if any(target in serialized_module for target in _CALLBACK_TARGETS):
            raise UnsupportedLeafError(
                "this JAX computation calls back into Python (jax.debug.print, jax.pure_callback, "
                "io_callback ...), which does not survive serialization by TFF; return the value "
                "from the computation instead, or use the context's debug=True to find a NaN"
            )
        module = jax_internals.read_hlo_module(serialized_module)
        self.name = module.name.removeprefix("jit_")
        self._stablehlo = module.stablehlo
        self._result_avals = tuple(ShapedArray(s.shape, s.dtype) for s in module.results)
        # Inside jit, JAX lowers equal calls of a jitted function once; a leaf that a computation
        # uses several times is merged into the program once.
        bind = functools.partial(_call_p.bind, leaf=self)
        self._call = jax.jit(lambda *arguments: bind(*arguments))

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        """Calls the module on its parameters in HLO order and returns its flat results."""
        return self._call(*arguments)


@functools.lru_cache(maxsize=1024)
def load_leaf(serialized_module: bytes) -> Leaf:
    """Returns the `Leaf` of a serialized module; equal modules share one."""
    return Leaf(serialized_module)


def hlo_text(computation) -> str:
    """Returns the HLO program that TFF holds for a JAX computation.

    Args:
      computation: A `tff.jax.computation`.

    Returns:
      The module in XLA's text form.

    Raises:
      UnsupportedLeafError: The computation is not a single JAX computation.
    """
    proto = frontend.framework.serialize_computation(computation)
    kind = proto.WhichOneof("computation")
    if kind != "xla":
        raise UnsupportedLeafError(
            f"only a tff.jax.computation holds HLO of its own, given one of kind {kind}"
        )
    return jax_internals.hlo_text(proto.xla.hlo_module.value).strip()


_call_p = jax_internals.Primitive("tff_leaf")
_call_p.multiple_results = True


@_call_p.def_abstract_eval
def _abstract_eval(*_, leaf: Leaf):
    return leaf._result_avals


@_call_p.def_impl
def _impl(*arguments, leaf: Leaf):
    # A leaf is a program and cannot run op by op: without jit, `leaf` would come back here.
    with jax.disable_jit(False):
        return leaf(*arguments)


def _lower(ctx, *arguments, leaf: Leaf):
    return jax_internals.call_stablehlo(ctx, leaf.name, leaf._stablehlo, arguments)


jax_internals.register_lowering(_call_p, _lower)
