"""What both front ends make of a JAX function, and what they refuse: the same in both lanes."""

import collections

import attrs
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.federated import frontend, tff
from helpers.federated.jax_internals import enable_x64

VECTOR = tff.TensorType(np.float32, (3,))
PAIR = collections.OrderedDict(b=VECTOR, a=np.int32)
NO_CONTAINER = tff.StructType([("b", np.int32), ("a", np.int32)])

of_federated_language = pytest.mark.skipif(
    frontend.NAME != "federated-language", reason="is about the front end of lane B"
)


@attrs.define
class Flipped:
    """A container whose fields JAX sees in another order than TFF."""

    b: object
    a: object


jax.tree_util.register_pytree_node(
    Flipped, lambda pair: ((pair.a, pair.b), None), lambda _, parts: Flipped(a=parts[0], b=parts[1])
)
FLIPPED = tff.types.StructWithPythonType([("b", np.int32), ("a", np.int32)], Flipped)


SIGNATURES = {
    "no argument": (lambda: 1.5, (), "( -> float32)"),
    "one": (lambda x: x, (VECTOR,), "(float32[3] -> float32[3])"),
    "two by name": (lambda x, y: x, (VECTOR, np.int32), "(<x=float32[3],y=int32> -> float32[3])"),
    "two in one": (lambda x: x[1], (np.int8, np.bool_), "(<int8,bool> -> bool)"),
    "ordered dict": (lambda x: x, (PAIR,), "(<b=float32[3],a=int32> -> <b=float32[3],a=int32>)"),
    "dict, which JAX sorts": (lambda x: {"b": x, "a": 1.5}, (np.int32,),
                              "(int32 -> <a=float32,b=int32>)"),
    "nested": (lambda x: [(x,), {}], (np.int32,), "(int32 -> <<int32>,<>>)"),
    "constants": (lambda x: (True, 1, 1.5, 1j), (np.int32,),
                  "(int32 -> <bool,int32,float32,complex64>)"),
    "no container": (lambda x: (x.a, x[0]), (NO_CONTAINER,),
                     "(<b=int32,a=int32> -> <int32,int32>)"),
    "empty": (lambda x: x, ((),), "(<> -> <>)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "types", "wanted"), SIGNATURES.values(), ids=SIGNATURES.keys()
)
def test_the_type_of_a_computation(function, types, wanted):
    assert str(tff.jax.computation(function, *types).type_signature) == wanted


def test_results_are_64_bits_wide_with_x64():
    with enable_x64(True):
        computation = tff.jax.computation(lambda x: (x, 1.5), np.int64)
    assert str(computation.type_signature) == "(int64 -> <int64,float64>)"


# What is given, the error, and what its message has to name, in any order.
REFUSED = {
    "string": (np.str_, ValueError, ["JAX", "str"]),
    "64-bit integer": (np.int64, ValueError, ["jax_enable_x64", "int64"]),
    "64-bit field": ([("a", np.float64)], ValueError, ["jax_enable_x64", "<a=float64>"]),
    "open shape": (tff.TensorType(np.int32, (None,)), TypeError, ["fully.defined", r"int32\[\?\]"]),
    "open rank": (tff.TensorType(np.int32, None), TypeError, ["fully.defined", "int32"]),
    "sequence": (tff.SequenceType(np.int32), TypeError, ["tensor", "struct", r"int32\*"]),
    "placed": (tff.FederatedType(np.int32, tff.CLIENTS), TypeError, ["tensor", "int32}@CLIENTS"]),
    "function": (tff.FunctionType(None, np.int32), TypeError, ["tensor", "-> int32"]),
}


@pytest.mark.parametrize(("type_spec", "error", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_jax_cannot_take_is_refused_where_it_is_declared(type_spec, error, named):
    with pytest.raises(error, match="(?s)" + "".join(f"(?=.*{what})" for what in named)):
        tff.jax.computation(lambda x: x, type_spec)


@pytest.mark.parametrize("result", [None, "text", {1: 2}])
def test_a_result_that_is_no_struct_of_arrays_is_refused(result):
    with pytest.raises(TypeError):
        tff.jax.computation(lambda x: result, np.int32)


def test_defaults_are_refused():
    with pytest.raises(TypeError, match="`y` with default value 1"):
        tff.jax.computation(lambda x, y=1: x, np.int32)


def test_a_computation_cannot_be_called_inside_another():
    inner = tff.jax.computation(lambda x: x, np.int32)
    with pytest.raises(NotImplementedError, match="JAX"):
        tff.jax.computation(lambda x: inner(x), np.int32)


def test_the_fields_of_an_argument_that_jax_sees_in_another_order():
    computation = tff.jax.computation(lambda pair: pair.b - pair.a, FLIPPED)
    assert computation(Flipped(b=7, a=2)) == 5
    sort = tff.jax.computation(lambda x: 10 * x["b"] + x["a"], {"b": np.int32, "a": np.int32})
    assert sort({"b": 1, "a": 2}) == 12


@of_federated_language  # That of TFF mixes the fields up.
def test_the_fields_of_a_result_that_jax_sees_in_another_order():
    computation = tff.jax.computation(lambda x: Flipped(b=x, a=-x), np.int32)
    assert computation(1) == Flipped(b=1, a=-1)


@of_federated_language  # TFF hands the function a struct with the argument in it.
def test_a_polymorphic_function_of_one_argument():
    increment = tff.jax.computation(lambda x: x + 1)
    assert increment(1) == 2
    assert increment(np.float32(0.5)) == 1.5


@of_federated_language
def test_a_container_that_jax_does_not_know_is_refused_by_name():
    @attrs.define
    class Unknown:
        a: object

    type_spec = tff.types.StructWithPythonType([("a", np.int32)], Unknown)
    with pytest.raises(TypeError, match=r"Unknown.*register_pytree_node"):
        tff.jax.computation(lambda x: x.a, type_spec)


@of_federated_language
def test_a_name_that_only_tff_has_is_refused_by_name():
    with pytest.raises(AttributeError, match=r"no 'backends'.*tensorflow-federated"):
        _ = tff.backends


def test_what_is_serialized_is_the_program_in_xla_form():
    add = tff.jax.computation(lambda x, y: x + y, np.int32, np.int32)
    proto = tff.framework.serialize_computation(add)
    assert proto.WhichOneof("computation") == "xla"
    assert proto.xla.hlo_module.type_url == "type.googleapis.com/xla.HloModuleProto"
    assert [part.tensor.index for part in proto.xla.parameter.struct.element] == [0, 1]


@pytest.mark.parametrize("value", [lambda x: x, 3, tff.jax.computation(lambda x: x)])
def test_only_a_computation_with_its_types_can_be_serialized(value):
    with pytest.raises(TypeError):
        tff.framework.serialize_computation(value)


start = tff.jax.computation(lambda: jnp.int32(0))
step = tff.jax.computation(lambda state: state + 1, np.int32)
step_and_report = tff.jax.computation(lambda state, x: (state, x), np.int32, np.float32)


@pytest.mark.parametrize("next_fn", [step, step_and_report])
def test_an_iterative_process_knows_its_state(next_fn):
    process = tff.templates.IterativeProcess(initialize_fn=start, next_fn=next_fn)
    assert process.state_type == tff.TensorType(np.int32)
    assert (process.initialize, process.next) == (start, next_fn)


@pytest.mark.parametrize(("initialize_fn", "next_fn"), [
    (step, step),
    (start, start),
    (start, cases.double),
    (start, tff.jax.computation(lambda state: jnp.float32(state), np.int32)),
    (start, tff.jax.computation(lambda x, state: state, np.float32, np.int32)),
    (start, lambda state: state),
    (lambda: 0, step),
])  # fmt: skip
def test_an_iterative_process_whose_states_do_not_meet_is_refused(initialize_fn, next_fn):
    with pytest.raises((TypeError, AttributeError)):  # TFF trips over a missing parameter.
        tff.templates.IterativeProcess(initialize_fn=initialize_fn, next_fn=next_fn)
