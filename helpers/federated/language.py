"""TFF's names over federated-language 0.5, for lane B.

federated-language is the core of TensorFlow Federated (types, building blocks, intrinsics) as its
maintainers carry it on. It has no JAX front end, no templates and no runtime. `tff` offers what it
has under the names of tensorflow-federated 0.87, with the JAX front end of `jax_computation` and
the template that `averaging` needs; the runtime is this package's own. Goes when one front end
serves both lanes.
"""

import types

import federated_language
from federated_language import framework
from federated_language.common_libs import structure

from helpers.federated import jax_computation


class _Namespace(types.SimpleNamespace):
    """A namespace that says where a name of TFF can be had if it is not here."""

    def __getattr__(self, name):
        raise AttributeError(
            f"federated-language {federated_language.__version__}, the front end of this process, "
            f"has no {name!r}; tensorflow-federated may have it, which needs Python 3.11"
        )


def _public(module) -> dict:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def serialize_computation(computation):
    """Returns the protocol buffer of a computation.

    Args:
      computation: A `tff.jax.computation` or `tff.federated_computation` with its types known.

    Raises:
      TypeError: It is something else.
    """
    _check_computation("computation", computation)
    return computation.to_proto()


def deserialize_computation(proto):
    """Returns the computation of a protocol buffer; its structs have lost their containers."""
    return framework.ConcreteComputation.from_proto(proto)


class IterativeProcess:
    """Two computations: one makes a state, the other takes it to the next.

    The state is the result of `initialize`, the first (or only) argument of `next` and the first
    (or only) part of its result.
    """

    def __init__(self, initialize_fn, next_fn):
        """Pairs two computations.

        Args:
          initialize_fn: A computation without an argument.
          next_fn: A computation of a state, or of a state and more.

        Raises:
          TypeError: They are not computations, or a state that one returns does not fit the
            argument of the other.
        """
        _check_computation("initialize_fn", initialize_fn)
        _check_computation("next_fn", next_fn)
        if initialize_fn.type_signature.parameter is not None:
            raise TypeError(
                "initialize_fn must take no argument, found the type "
                f"{initialize_fn.type_signature}"
            )
        initial = initialize_fn.type_signature.result
        parameter, result = next_fn.type_signature.parameter, next_fn.type_signature.result
        state = _first(parameter, lambda part: part.is_assignable_from(initial))
        if state is None:
            raise TypeError(
                f"next_fn must take the state {initial} that initialize_fn returns, as its only "
                f"or first argument; its parameter is {parameter}"
            )
        if _first(result, state.is_assignable_from) is None:
            raise TypeError(
                f"next_fn must return a state {state} as its only or first result, found {result}"
            )
        self._state_type = state
        self._initialize_fn = initialize_fn
        self._next_fn = next_fn

    @property
    def initialize(self):
        """Computation that returns the first state."""
        return self._initialize_fn

    @property
    def next(self):
        """Computation that takes a state, and possibly more, to the next state."""
        return self._next_fn

    @property
    def state_type(self):
        """Type of the state."""
        return self._state_type


def _first(type_spec, fits):
    """Returns a type if it fits, else its first field if that does, else None."""
    if type_spec is not None and fits(type_spec):
        return type_spec
    if isinstance(type_spec, federated_language.StructType) and len(type_spec):
        return type_spec[0] if fits(type_spec[0]) else None
    return None


def _check_computation(name: str, value) -> None:
    if not isinstance(value, framework.ConcreteComputation):
        raise TypeError(
            f"{name} must be a computation whose argument types are known, "
            f"given {type(value).__name__}"
        )


tff = _Namespace(
    **_public(federated_language)
    | {
        "__name__": federated_language.__name__,
        "__version__": federated_language.__version__,
        "framework": _Namespace(
            **_public(framework),
            serialize_computation=serialize_computation,
            deserialize_computation=deserialize_computation,
        ),
        "jax": _Namespace(computation=jax_computation.computation),
        "structure": structure,
        "templates": _Namespace(IterativeProcess=IterativeProcess),
        "types": _Namespace(
            StructWithPythonType=federated_language.StructWithPythonType,
            type_to_py_container=framework.type_to_py_container,
        ),
    }
)
