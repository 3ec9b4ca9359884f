"""JAX computations on their own: binding, dtypes, containers, serialization."""

import collections
import typing

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import federated
from helpers.federated import tff

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
    with jax.experimental.enable_x64():

        @tff.jax.computation(tff.TensorType(dtype, (2,)))
        def double(x):
            return x + x

        given = np.array([1, 2**40], dtype)
        got = double(given)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, given + given)


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
    "inv": jnp.linalg.inv,
    "eigh": lambda x: jnp.linalg.eigh(x)[0],
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "sort": jnp.sort,
    "scan": lambda x: jax.lax.scan(lambda total, row: (total + row, total), x[0], x),
    "random": lambda x: jax.random.normal(jax.random.PRNGKey(0), (2, 2)) + x,
    "convolve": lambda x: jax.scipy.signal.convolve2d(x, x),
}


@pytest.mark.parametrize("function", LEAVES.values(), ids=LEAVES.keys())
def test_leaves_of_all_kinds_equal_jit(function):
    computation = tff.jax.computation(_jitted(function), tff.TensorType(np.float32, (2, 2)))
    got = jax.tree_util.tree_leaves(computation(SYMMETRIC))
    wanted = jax.tree_util.tree_leaves(jax.jit(function)(SYMMETRIC))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_calls_back_into_python_is_refused():
    @tff.jax.computation(np.float32)
    def chatty(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(federated.UnsupportedLeafError, match="calls back into Python"):
        chatty(1.0)


def test_a_tensorflow_leaf_names_the_context_that_runs_it():
    computation = tff.tensorflow.computation(lambda x: x + 1, np.int32)
    with pytest.raises(
        federated.UnsupportedLeafError, match=r"native\.set_sync_local_cpp_execution_context"
    ):
        computation(1)


def test_the_contexts_that_messages_name_exist():
    from helpers.federated import evaluate

    for name in {*evaluate._OTHER_CONTEXTS.values(), evaluate._NATIVE}:
        target = tff
        for part in name.removeprefix("tff.").removesuffix("()").split("."):
            target = getattr(target, part)
        assert callable(target)
