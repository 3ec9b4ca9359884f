"""Bad input: each a clear error that names the place, and the context goes on working."""

import collections

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import federated
from helpers.federated import tff, transfer

PAIR = collections.OrderedDict(b=tff.TensorType(np.float32, (2,)), a=np.int32)
first = tff.jax.computation(lambda x: x["a"], PAIR)
whole = tff.jax.computation(lambda x: x, np.int32)
small = tff.jax.computation(lambda x: x, np.int8)
real = tff.jax.computation(lambda x: x, np.float32)
half = tff.jax.computation(lambda x: x, np.float16)


@tff.federated_computation(
    tff.FederatedType(tff.SequenceType(cases.BATCH_TYPE), tff.CLIENTS),
    tff.FederatedType(np.float32, tff.CLIENTS),
)
def weights_of(data, weights):
    return tff.federated_sum(weights)


def batch(**changes):
    """A good batch, or one with changed fields (None leaves a field out)."""
    fields = {**cases.random_batch(np.random.default_rng(0)), **changes}
    return {name: value for name, value in fields.items() if value is not None}


BAD_DATA = {
    "shape": (
        [[batch()], [batch(), batch(pixels=np.zeros((4, 2), np.float32))]],
        r"client 1, batch 1, field pixels: expected shape \[4, 3\].*given \[4, 2\]",
    ),
    "ragged last batch": (
        [[batch()], [batch(pixels=np.zeros((1, 3), np.float32))]],
        r"client 1, batch 0, field pixels.*drop_remainder=True",
    ),
    "dtype": (
        [[batch(pixels=np.zeros((4, 3)))], [batch()]],
        r"client 0, batch 0, field pixels: expected dtype float32, given float64.*astype",
    ),
    "missing field": (
        [[batch()], [batch(labels=None)]],
        r"client 1, batch 0: field 'labels' is missing",
    ),
    "extra field": ([[batch(mask=1)], [batch()]], r"batch 0: field 'mask' is not in the type"),
    "no sequence": ([[batch()], None], r"client 1: expected a sequence.*given NoneType"),
    "a string": ([[batch()], "ab"], r"client 1: expected a sequence.*given str"),
    "one batch instead of a list": ([[batch()], batch()], r"client 1: expected a sequence"),
    "no struct": ([[3], [batch()]], r"client 0, batch 0: expected a struct.*given int"),
    "no list of clients": ({"a": [batch()]}, r"field data is placed at the clients.*given dict"),
    "empty cohort": ([], r"field data is an empty cohort"),
    "cohorts of two sizes": ([[batch()]], r"field data holds 1 clients.*field weights holds 2"),
}


@pytest.mark.parametrize(("data", "message"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_bad_client_data_is_refused_with_its_place(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        weights_of(data, [1.0, 2.0])
    assert weights_of([[batch()], []], [1.0, 2.0]) == 3


UNFIT = [
    (whole, 1.5),
    (whole, True),
    (whole, "1"),
    (whole, None),
    (whole, 2**31),
    (whole, [1]),
    (whole, np.int64(1)),
    (whole, np.uint32(1)),
    (whole, np.float32(1)),
    (whole, whole),
    (small, 128),
    (real, 1j),
    (real, np.int32(1)),
    (real, np.float64(1)),
    (real, [[1.0], [1.0, 2.0]]),
    (real, 1e300),
    (half, 70000),
    (whole, jax.random.key(0)),
    (whole, b"1"),
    (real, [1.0]),
    (real, [None]),
    (half, jnp.bfloat16(1)),
    (first, 5),
    (first, [[1.0, 2.0]]),
    (first, {"b": [1.0, 2.0]}),
    (first, {"b": [1.0, 2.0], "a": 1, "c": 2}),
    (first, {"b": [1.0], "a": 1}),
]


@pytest.mark.parametrize(("computation", "value"), UNFIT)
def test_values_that_do_not_fit_are_refused(computation, value):
    with pytest.raises(TypeError, match=r"expected|does not fit|missing|not in the type"):
        computation(value)
    assert whole(1) == 1, "the context is no longer usable"


FIT = [
    (whole, np.int8(-3), -3),
    (whole, np.uint8(3), 3),
    (whole, jnp.int16(4), 4),
    (small, -128, -128),
    (real, 2, 2),
    (real, np.float16(0.5), 0.5),
    (real, np.array(1.5, np.float32), 1.5),
    (half, 0.5, 0.5),
    (half, float("inf"), np.inf),
    (real, ml_dtypes.bfloat16(0.5), 0.5),
    (first, [[1.0, 2.0], 7], 7),
    (first, {"a": 7, "b": (1, 2)}, 7),
]


@pytest.mark.parametrize(("computation", "value", "wanted"), FIT)
def test_values_that_fit_exactly_enough_are_taken(computation, value, wanted):
    assert computation(value) == wanted


def test_a_list_of_bfloat16_scalars_is_taken():
    pair = tff.jax.computation(lambda x: x, tff.TensorType(np.float32, (2,)))
    got = pair([ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(2)])
    np.testing.assert_array_equal(got, [1, 2])


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.float32])
def test_an_empty_list_is_an_array_of_any_dtype(dtype):
    got = tff.jax.computation(lambda x: x, tff.TensorType(dtype, (0,)))([])
    assert (got.dtype, got.shape) == (np.dtype(dtype), (0,))


@pytest.mark.parametrize("cohort", [{1, 2}, np.array([1, 2], np.int32), "ab", None, 3, iter([1])])
def test_a_cohort_that_is_no_list_is_refused(cohort):
    computation = tff.federated_computation(
        lambda x: tff.federated_sum(x), tff.FederatedType(np.int32, tff.CLIENTS)
    )
    with pytest.raises(TypeError, match=r"placed at the clients.*expected a list with one value"):
        computation(cohort)
    assert computation([1, 2]) == 3


@pytest.mark.parametrize(("values", "named"), [((1.0,), {}), ((1.0, 2.0, 3.0), {}),
    ((), {"x": 1.0, "z": 2.0}), ((), {"x": 1.0}), ((1.0,), {"x": 1.0}), ((), {})])  # fmt: skip
def test_missing_and_extra_arguments_are_refused(values, named):
    with pytest.raises(TypeError):
        cases.multiply(*values, **named)
    assert cases.multiply(y=3.0, x=2.0) == 6


def test_tensorflow_tensors_are_taken():
    tf = pytest.importorskip("tensorflow", reason="lane B has no TensorFlow")

    assert whole(tf.constant(5)) == 5


def test_strings_are_refused_by_name():
    computation = tff.federated_computation(lambda x: x, np.str_)
    with pytest.raises(federated.UnsupportedTypeError, match="XLA has no strings"):
        computation("a")


def test_undefined_shapes_are_refused_by_name():
    computation = tff.federated_computation(lambda x: x, tff.TensorType(np.float32, (None,)))
    with pytest.raises(federated.UnsupportedTypeError, match="fully defined shapes"):
        computation([1.0])


def test_a_function_as_an_argument_is_refused():
    computation = tff.federated_computation(
        lambda f: f(np.int32(1)), tff.FunctionType(np.int32, np.int32)
    )
    with pytest.raises(TypeError, match="cannot take as an argument"):
        computation(whole)


@pytest.mark.parametrize("options", [{"default_num_clients": -1}, {"devices": []}])
def test_bad_options_of_the_context_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        federated.create_local_python_execution_context(**options)


DATA_TYPE, WEIGHTS_TYPE = weights_of.type_signature.parameter


def test_a_device_value_stands_for_the_value(context):
    data = context.device_put([[batch()], [batch(), batch()]], DATA_TYPE)
    assert data.type_signature == DATA_TYPE
    weights = context.device_put([1.0, 2.0], WEIGHTS_TYPE)
    assert weights_of(data, weights) == 3
    assert weights_of(data, [3.0, 4.0]) == 7


def test_a_device_value_of_another_type_is_refused(context):
    data = context.device_put([[batch()], []], DATA_TYPE)
    with pytest.raises(TypeError, match="given a DeviceValue of"):
        weights_of(data, data)


def test_a_device_value_of_another_cohort_is_refused(context):
    data = context.device_put([[batch()], []], DATA_TYPE)
    with pytest.raises(ValueError, match="cohorts of different sizes"):
        weights_of(data, [1.0])


def test_sizes_are_rounded_up_by_a_quarter_at_most():
    for count in range(1, 2000):
        assert count <= transfer.round_up(count) <= max(8, count * 1.25)


def test_rounded_sizes_are_few():
    assert len({transfer.round_up(count) for count in range(1, 1025)}) <= 40


@pytest.mark.parametrize("debug_mode", [False, True])
def test_a_device_value_does_not_change_with_the_array_it_came_from(debug_mode):
    context = federated.create_local_python_execution_context(debug=debug_mode)
    memory = np.ones(64, np.float32)
    aligned = memory[-memory.ctypes.data % 64 // 4 :][:32]  # What XLA would share.
    type_spec = tff.TensorType(np.float32, (32,))
    same = tff.jax.computation(lambda x: x, type_spec)
    with tff.framework.get_context_stack().install(context):
        value = context.device_put(aligned, type_spec)
        memory[:] = 5
        np.testing.assert_array_equal(same(value), np.ones(32))


def test_a_value_equal_at_all_clients_is_one_value():
    computation = tff.federated_computation(
        lambda same, x: (tff.federated_sum(same), tff.federated_sum(x), same),
        tff.FederatedType(np.float32, tff.CLIENTS, all_equal=True),
        tff.FederatedType(np.float32, tff.CLIENTS),
    )
    assert computation(2.0, [1.0, 2.0, 3.0]) == (6, 6, 2)


@pytest.mark.parametrize("type_spec", [np.int64, np.str_, tff.TensorType(np.int32, (None,))])
def test_a_device_value_of_a_type_that_jax_cannot_hold_is_refused(context, type_spec):
    with pytest.raises(federated.UnsupportedTypeError):
        context.device_put(1, tff.to_type(type_spec))


def test_a_sequence_of_elements_without_a_tensor_is_refused():
    computation = tff.federated_computation(lambda x: x, tff.SequenceType(tff.to_type(())))
    with pytest.raises(federated.UnsupportedTypeError, match="must hold a tensor"):
        computation([(), ()])
