"""JAX computations on their own: binding, dtypes, containers, serialization."""

import collections
import typing

import attrs
import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import federated
from helpers.federated import frontend, tff
from helpers.federated.jax_internals import enable_x64

DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32,
    np.float16, ml_dtypes.bfloat16, np.float32, np.complex64,
]  # fmt: skip


class Point(typing.NamedTuple):
    b: typing.Any
    a: typing.Any


@attrs.define
class Pair:
    b: object
    a: object


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.b, pair.a), None), lambda _, children: Pair(*children)
)


def test_adding_two_numbers():
    @tff.jax.computation(np.int32, np.int32)
    def add_numbers(x, y):
        return x + y

    assert str(add_numbers.type_signature) == "(<x=int32,y=int32> -> int32)"
    assert add_numbers(2, 3) == 5


def test_keyword_arguments_bind_by_name_in_any_order():
    @tff.jax.computation(np.int32, np.int32)
    def subtract(x, y):
        return x - y

    assert subtract(y=1, x=10) == 9


@pytest.mark.parametrize("value", [
    collections.OrderedDict(b=[1.0, 2.0], a=7),
    collections.OrderedDict(a=7, b=[1.0, 2.0]),
])  # fmt: skip
def test_fields_out_of_alphabetical_order_bind_by_name(value):
    @tff.jax.computation(collections.OrderedDict(b=tff.TensorType(np.float32, (2,)), a=np.int32))
    def pick(x):
        return x["b"] * 2, x["a"]

    doubled, same = pick(value)
    np.testing.assert_array_equal(doubled, [2, 4])
    assert same == 7


def test_unused_arguments_are_no_trouble():
    @tff.jax.computation(np.int32, np.float32, np.int32)
    def third(x, y, z):
        return z

    assert third(1, 2.0, 3) == 3


def test_a_result_that_is_an_argument_belongs_to_the_caller():
    @tff.jax.computation(tff.TensorType(np.float32, (2,)))
    def twice_the_same(x):
        return x, x

    given = np.array([1, 2], np.float32)
    first, second = twice_the_same(given)
    first[0] = 99
    np.testing.assert_array_equal(given, [1, 2])
    np.testing.assert_array_equal(second, [1, 2])


def test_one_array_may_be_passed_twice():
    @tff.jax.computation(tff.TensorType(np.float32, (2,)), tff.TensorType(np.float32, (2,)))
    def subtract(x, y):
        return x - y

    same = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(subtract(same, same), [0, 0])


def test_no_argument():
    @tff.jax.computation
    def constants():
        return jnp.arange(3), {"z": 1.5}

    numbers, rest = constants()
    np.testing.assert_array_equal(numbers, [0, 1, 2])
    assert rest == {"z": 1.5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_every_shared_dtype_passes_unchanged(dtype, shape):
    @tff.jax.computation(tff.TensorType(dtype, shape))
    def identity(x):
        return x

    given = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype)
    got = identity(given)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, given)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex128])
def test_64_bit_dtypes_with_x64(dtype):
    with enable_x64(True):

        @tff.jax.computation(tff.TensorType(dtype, (2,)))
        def double(x):
            return x + x

        given = np.array([1, 2**40], dtype)
        got = double(given)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, given + given)


def test_64_bit_dtypes_are_refused_once_x64_is_off_again(context):
    with enable_x64(True):
        increment = tff.jax.computation(lambda x: x + 1, np.int64)
        assert increment(2**40) == 2**40 + 1
    with pytest.raises(federated.UnsupportedTypeError, match="jax_enable_x64"):
        increment(2**40)
    with enable_x64(True):
        assert increment(2**41) == 2**41 + 1
    assert context.cache_info().compilations == 1


def test_64_bit_dtypes_without_x64_are_refused_by_name():
    total = tff.federated_computation(tff.federated_sum, tff.FederatedType(np.int64, tff.CLIENTS))
    with pytest.raises(federated.UnsupportedTypeError, match="jax_enable_x64"):
        total([np.int64(1)])


def test_nested_structures_keep_their_containers():
    @tff.jax.computation(np.float32)
    def nest(x):
        return collections.OrderedDict(b=(x, [x + 1]), a=Point(x + 2, {"c": x + 3}))

    got = nest(0.0)
    assert type(got) is collections.OrderedDict
    assert list(got) == ["b", "a"]
    assert got == collections.OrderedDict(b=(0, [1]), a=Point(2, {"c": 3}))
    assert type(got["a"]) is Point


def test_named_tuples_and_attrs_classes_as_arguments():
    @tff.jax.computation(Point(np.int32, np.float32))
    def swap(point):
        return Point(point.a, point.b)

    @tff.jax.computation(tff.types.StructWithPythonType([("b", np.int32), ("a", np.int32)], Pair))
    def difference(pair):
        return pair.b - pair.a

    assert swap(Point(1, 2.5)) == Point(2.5, 1)
    assert difference(Pair(b=7, a=2)) == 5


def test_a_struct_with_some_names_stays_a_struct():
    @tff.federated_computation(tff.StructType([("a", np.int32), (None, np.int32)]))
    def same(x):
        return x

    got = same(tff.structure.Struct([("a", 1), (None, 2)]))
    assert isinstance(got, tff.structure.Struct)
    assert tff.structure.to_elements(got) == [("a", 1), (None, 2)]


def test_a_polymorphic_computation_is_traced_for_each_type():
    @tff.jax.computation
    def add(x, y):
        return x + y

    assert add(1, 2) == 3
    assert add(np.float32(0.5), np.float32(1)) == 1.5


def test_a_computation_that_was_serialized_runs_without_its_function():
    def double(x):
        assert not used_up, "the Python function was called"
        return 2 * x

    used_up = []
    proto = tff.framework.serialize_computation(tff.jax.computation(double, np.int32))
    used_up.append(True)
    restored = tff.framework.deserialize_computation(proto)
    assert restored(21) == 42


def test_results_are_jax_arrays_if_asked():
    double = tff.jax.computation(lambda x: 2 * x, np.float32)
    context = federated.create_local_python_execution_context(device_results=True)
    with tff.framework.get_context_stack().install(context):
        got = double(1.5)
    assert isinstance(got, jax.Array)
    assert got == 3


def test_the_hlo_of_a_computation_can_be_read():
    add = tff.jax.computation(lambda x, y: x + y, np.int32, np.int32)
    assert "s32[] add(" in federated.hlo_text(add)


def _jitted(function):
    return lambda x: function(x)  # TFF takes no defaults, which NumPy-like functions have.


SYMMETRIC = np.array([[4, 1], [1, 3]], np.float32)


LEAVES = {
    "cholesky": jnp.linalg.cholesky,
    "qr": lambda x: jnp.linalg.qr(x)[1],
    "solve": lambda x: jnp.linalg.solve(x, x + 1),
    "inv": jnp.linalg.inv,
    "eigh": lambda x: jnp.linalg.eigh(x)[0],
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "sort": jnp.sort,
    "scan": lambda x: jax.lax.scan(lambda total, row: (total + row, total), x[0], x),
    "random": lambda x: jax.random.normal(jax.random.PRNGKey(0), (2, 2)) + x,
    "convolve": lambda x: jax.scipy.signal.convolve2d(x, x),
    "conv": lambda x: jax.lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME"),
    "while loop": lambda x: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: 2 * c, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > x[1, 1], jnp.sin, jnp.cos, x),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "top_k": lambda x: jax.lax.top_k(x, 1),
    "argsort": lambda x: jnp.argsort(x, axis=0),
}


@pytest.mark.parametrize("function", LEAVES.values(), ids=LEAVES.keys())
def test_leaves_of_all_kinds_equal_jit(function):
    computation = tff.jax.computation(_jitted(function), tff.TensorType(np.float32, (2, 2)))
    got = jax.tree_util.tree_leaves(computation(SYMMETRIC))
    wanted = jax.tree_util.tree_leaves(jax.jit(function)(SYMMETRIC))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _print(x):
    jax.debug.print("{}", x)
    return x


FLOAT = jax.ShapeDtypeStruct((), np.float32)
CALLBACKS = {
    "debug.print": _print,
    "pure_callback": lambda x: jax.pure_callback(np.sin, FLOAT, x),
    "io_callback": lambda x: jax.experimental.io_callback(np.sin, FLOAT, x),
}


@pytest.mark.parametrize("function", CALLBACKS.values(), ids=CALLBACKS.keys())
def test_a_leaf_that_calls_back_into_python_is_refused(function):
    leaf = tff.jax.computation(_jitted(function), np.float32)
    computation = tff.federated_computation(
        lambda x: tff.federated_map(leaf, x), tff.FederatedType(np.float32, tff.CLIENTS)
    )
    with pytest.raises(federated.UnsupportedLeafError, match="calls back into Python"):
        computation([1.0])


def test_a_leaf_with_a_random_key_as_its_argument_draws_what_jax_draws():
    draw = tff.jax.computation(
        lambda key: jax.random.normal(key, (5,)), tff.TensorType(np.uint32, (2,))
    )
    key = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(draw(key), jax.random.normal(key, (5,)))


def test_a_tensorflow_leaf_names_the_context_that_runs_it():
    with pytest.raises(
        federated.UnsupportedLeafError, match=r"native\.set_sync_local_cpp_execution_context"
    ):
        cases.tensorflow_leaf()(1)


@cases.of_tensorflow_federated
def test_the_contexts_that_messages_name_exist():
    for name in (frontend.NATIVE_CONTEXT, frontend.TEST_CONTEXT):
        target = tff
        for part in name.removeprefix("tff.").removesuffix("()").split("."):
            target = getattr(target, part)
        assert callable(target)


@pytest.mark.parametrize("type_spec", [np.float32, tff.TensorType(np.float32, (2,))])
@pytest.mark.parametrize("wrap", [
    lambda x: (x,), lambda x: [x], lambda x: {"a": x}, lambda x: (x, (x, x)),
])  # fmt: skip
def test_results_keep_their_nesting(wrap, type_spec):
    given = np.ones(tff.to_type(type_spec).shape, np.float32)
    got = tff.jax.computation(_jitted(wrap), type_spec)(given)
    wanted = wrap(given)
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(wanted)


@pytest.mark.parametrize(("type_spec", "value", "wanted"), [
    ((), (), ()), ([], [], []), ({}, {}, {}), ([np.int32, ()], [1, ()], [1, ()]),
])  # fmt: skip
def test_empty_structures_pass(type_spec, value, wanted):
    same = tff.federated_computation(lambda x: x, tff.to_type(type_spec))
    assert same(value) == wanted


def test_clients_may_hold_empty_structures():
    same = tff.federated_computation(lambda x: x, tff.FederatedType(tff.to_type(()), tff.CLIENTS))
    assert same([(), ()]) == [(), ()]


def test_all_array_results_can_be_written_to():
    vector = tff.TensorType(np.float32, (2,))
    computation = tff.federated_computation(
        lambda x, s, y: (x, s, y, tff.federated_mean(x)),
        tff.FederatedType(vector, tff.CLIENTS),
        tff.SequenceType(vector),
        vector,
    )
    given = np.zeros((2,), np.float32)
    results = jax.tree_util.tree_leaves(computation([given, given], [given, given], given))
    assert len(results) == 6
    for number, result in enumerate(results):
        result[:] = number + 1
    assert [result[0] for result in results] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(given, [0, 0])


def test_results_on_the_device_do_not_share_the_callers_memory():
    memory = np.ones(64, np.float32)
    aligned = memory[-memory.ctypes.data % 64 // 4 :][:32]
    same = tff.jax.computation(lambda x: x, tff.TensorType(np.float32, (32,)))
    context = federated.create_local_python_execution_context(device_results=True)
    with tff.framework.get_context_stack().install(context):
        got = same(aligned)
    memory[:] = 5
    np.testing.assert_array_equal(got, np.ones(32))


def test_results_on_the_device_can_be_arguments(context):
    double = tff.jax.computation(lambda x: 2 * x, np.float32)
    on_device = federated.create_local_python_execution_context(device_results=True)
    with tff.framework.get_context_stack().install(on_device):
        got = double(double(double(1.0)))
    assert double(got) == 16


def test_the_containers_of_arguments_come_back():
    for value in ((1, 2), [1, 2], {"b": 1, "a": 2}, collections.OrderedDict(b=1, a=2), Point(1, 2)):
        type_spec = tff.to_type(jax.tree_util.tree_map(lambda _: np.int32, value))
        got = tff.federated_computation(lambda x: x, type_spec)(value)
        assert type(got) is type(value)
        assert got == value


def test_attrs_classes_at_the_clients_come_back():
    type_spec = tff.types.StructWithPythonType([("b", np.int32), ("a", np.int32)], Pair)
    same = tff.federated_computation(lambda x: x, tff.FederatedType(type_spec, tff.CLIENTS))
    cohort = [Pair(b=1, a=2), Pair(b=3, a=4)]
    assert same(cohort) == cohort


def test_a_type_without_containers_gives_ordered_dicts():
    type_spec = tff.StructType([("b", np.int32), ("a", np.int32)])
    got = tff.federated_computation(lambda x: x, type_spec)({"a": 2, "b": 1})
    assert got == collections.OrderedDict(b=1, a=2)
    assert type(got) is collections.OrderedDict


def test_a_polymorphic_federated_computation_is_traced_for_each_type():
    swap = tff.federated_computation(lambda x, y: (y, x))
    assert swap(1, 2.5) == (2.5, 1)
    assert swap(y=[1, 2], x=True) == ([1, 2], True)


def test_a_polymorphic_computation_takes_containers():
    add = tff.jax.computation(lambda x, y: x["a"] - y.b)
    assert add({"b": 1, "a": 5}, Point(b=2, a=0)) == 3


def _serialized_sum_of_squares():
    leaf = tff.jax.computation(lambda x: x * x, np.float32)
    computation = tff.federated_computation(
        lambda x: tff.federated_sum(tff.federated_map(leaf, x)),
        tff.FederatedType(np.float32, tff.CLIENTS),
    )
    return tff.framework.serialize_computation(computation)


def test_a_federated_computation_runs_after_serialization():
    proto = _serialized_sum_of_squares()
    proto = type(proto).FromString(proto.SerializeToString())
    assert tff.framework.deserialize_computation(proto)([1.0, 2.0, 3.0]) == 14


def test_a_result_that_is_a_function_is_refused():
    one = tff.jax.computation(lambda x: x, np.int32)
    with pytest.raises(federated.UnsupportedIntrinsicError, match="returns a function"):
        tff.federated_computation(lambda x: one, np.int32)(1)


@pytest.mark.parametrize(("computation", "kind"), [
    (tff.federated_computation(lambda x: x, np.int32), "lambda"),
    (cases.tensorflow_leaf(), "tensorflow"),
])  # fmt: skip
def test_hlo_of_what_holds_none_is_refused(computation, kind):
    with pytest.raises(federated.UnsupportedLeafError, match=f"HLO of its own.* kind {kind}"):
        federated.hlo_text(computation)
