"""TFF's intrinsics against NumPy."""

import collections
import importlib

import cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import federated
from helpers.federated import tff

FLOAT_AT_CLIENTS = tff.FederatedType(np.float32, tff.CLIENTS)
FLOAT_AT_SERVER = tff.FederatedType(np.float32, tff.SERVER)
INT_AT_CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)

add, double = cases.add, cases.double


def federated_fn(function, *types):
    """A federated computation of a Python function."""
    return tff.federated_computation(function, *types)


def test_map_keeps_the_order_of_the_clients():
    computation = federated_fn(lambda x: tff.federated_map(double, x), FLOAT_AT_CLIENTS)
    assert computation([3.0, 1.0, 2.0]) == [6, 2, 4]


def test_map_at_the_server_applies_the_function_once():
    computation = federated_fn(lambda x: tff.federated_map(double, x), FLOAT_AT_SERVER)
    assert computation(3.0) == 6


def test_broadcast_then_map_all_equal_stays_one_value():
    def function(x):
        return tff.federated_map(double, tff.federated_broadcast(x))

    # No public name makes this intrinsic.
    intrinsics = importlib.import_module(tff.federated_map.__module__)

    def all_equal(x):
        return intrinsics.federated_map_all_equal(double, tff.federated_broadcast(x))

    context = federated.create_local_python_execution_context(default_num_clients=3)
    with tff.framework.get_context_stack().install(context):
        assert federated_fn(function, FLOAT_AT_SERVER)(2.0) == [4, 4, 4]
        assert federated_fn(all_equal, FLOAT_AT_SERVER)(2.0) == 4


@pytest.mark.parametrize("dtype", [
    np.int8, np.int32, np.uint16, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64,
])  # fmt: skip
def test_sum_keeps_the_dtype(dtype):
    computation = federated_fn(
        tff.federated_sum, tff.FederatedType(tff.TensorType(dtype, (2,)), tff.CLIENTS)
    )
    got = computation([np.array([c, 1], dtype) for c in range(5)])
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, np.array([10, 5], dtype))


@pytest.mark.parametrize(("intrinsic", "reference"), [
    (tff.federated_sum, np.sum), (tff.federated_min, np.min), (tff.federated_max, np.max),
])  # fmt: skip
@settings(max_examples=15, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=40))
def test_integer_reductions_equal_numpy(intrinsic, reference, values):
    values = [np.int32(value // 64) for value in values]
    computation = _REDUCTIONS[intrinsic]
    assert computation(values) == reference(values)


_REDUCTIONS = {
    intrinsic: tff.federated_computation(intrinsic, INT_AT_CLIENTS)
    for intrinsic in (tff.federated_sum, tff.federated_min, tff.federated_max)
}


@pytest.mark.parametrize("values", [[-3.0, -1.0, -2.0], [np.inf, np.inf, np.inf], [5.0, 7.0, 6.0]])
def test_min_and_max_do_not_see_the_empty_slots(values):
    def function(x):
        return tff.federated_min(x), tff.federated_max(x)

    assert federated_fn(function, FLOAT_AT_CLIENTS)(values) == (min(values), max(values))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
)
def test_means_equal_numpy(values, seed):
    weights = np.random.default_rng(seed).integers(0, 5, len(values)).astype(np.float32)
    weights[0] = 1
    mean, weighted = _MEANS(np.float32(values).tolist(), weights.tolist())
    np.testing.assert_allclose(mean, np.mean(values), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(weighted, np.average(values, weights=weights), rtol=1e-5, atol=1e-4)


_MEANS = tff.federated_computation(
    lambda x, w: (tff.federated_mean(x), tff.federated_mean(x, weight=w)),
    FLOAT_AT_CLIENTS,
    FLOAT_AT_CLIENTS,
)


def test_mean_of_a_structure_goes_field_by_field():
    member = collections.OrderedDict(b=tff.TensorType(np.float32, (2,)), a=np.float32)
    computation = federated_fn(
        lambda x: tff.federated_mean(x), tff.FederatedType(member, tff.CLIENTS)
    )
    got = computation([{"b": [1.0, 2.0], "a": 3.0}, {"a": 5.0, "b": [3.0, 6.0]}])
    np.testing.assert_array_equal(got["b"], [2, 4])
    assert got["a"] == 4


def _weighted_mean(values, weights, weight_type=np.float32):
    computation = federated_fn(
        lambda x, w: tff.federated_mean(x, weight=w),
        FLOAT_AT_CLIENTS,
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    return computation(values, weights)


def test_integer_weights():
    assert _weighted_mean([1.0, 5.0], [3, 1], np.int32) == 2


def test_mean_of_no_weight_at_all_is_zero():
    assert _weighted_mean([1.0, 5.0], [0.0, 0.0]) == 0


def test_a_client_without_weight_cannot_poison_the_mean():
    assert _weighted_mean([np.nan, 5.0, np.inf], [0.0, 2.0, 0.0]) == 5


def test_a_nan_with_weight_is_not_hidden():
    assert np.isnan(_weighted_mean([np.nan, 5.0], [1.0, 2.0]))


def test_mean_in_half_precision_does_not_lose_small_terms():
    computation = federated_fn(
        lambda x: tff.federated_mean(x), tff.FederatedType(np.float16, tff.CLIENTS)
    )
    # Added up in float16, 3000 times 1 stops at 2048.
    assert computation([np.float16(1)] * 3000) == 1


@pytest.mark.parametrize("num_clients", [1, 7, 1000])
def test_aggregate_equals_a_python_loop(num_clients):
    accumulate = tff.jax.computation(
        lambda total, x: {"count": total["count"] + 1, "sum": total["sum"] + x},
        {"count": np.int32, "sum": np.float32},
        np.float32,
    )
    merge = tff.jax.computation(
        lambda a, b: {"count": a["count"] + b["count"], "sum": a["sum"] + b["sum"]},
        {"count": np.int32, "sum": np.float32},
        {"count": np.int32, "sum": np.float32},
    )
    report = tff.jax.computation(
        lambda total: total["sum"] / total["count"], {"count": np.int32, "sum": np.float32}
    )
    zero = tff.jax.computation(lambda: {"count": jnp.int32(0), "sum": jnp.float32(0)})
    computation = federated_fn(
        lambda x: tff.federated_aggregate(x, zero(), accumulate, merge, report), FLOAT_AT_CLIENTS
    )
    values = np.arange(num_clients, dtype=np.float32)
    np.testing.assert_allclose(computation(list(values)), values.mean(), rtol=1e-5)


def test_eval_and_value_at_both_placements():
    three = tff.jax.computation(lambda: jnp.float32(3))

    def function(x):
        return (
            tff.federated_eval(three, tff.SERVER),
            tff.federated_sum(tff.federated_eval(three, tff.CLIENTS)),
            tff.federated_value(4.0, tff.SERVER),
            tff.federated_sum(tff.federated_map(add, (x, tff.federated_value(1.0, tff.CLIENTS)))),
        )

    assert federated_fn(function, FLOAT_AT_CLIENTS)([1.0, 2.0]) == (3, 6, 4, 5)


def test_zip_at_both_placements_with_names():
    def function(x, y):
        at_clients = tff.federated_zip({"b": x, "a": {"c": tff.federated_broadcast(y)}})
        return at_clients, tff.federated_zip((y, y))

    clients, server = federated_fn(function, FLOAT_AT_CLIENTS, FLOAT_AT_SERVER)([1.0, 2.0], 9.0)
    assert clients == [{"b": 1, "a": {"c": 9}}, {"b": 2, "a": {"c": 9}}]
    assert server == (9, 9)


def test_aggregating_a_zipped_value_stacks_its_parts():
    def function(x, y):
        return tff.federated_mean(tff.federated_zip((x, tff.federated_broadcast(y))))

    assert federated_fn(function, FLOAT_AT_CLIENTS, FLOAT_AT_SERVER)([1.0, 3.0], 9.0) == (2, 9)


def test_computations_that_call_computations_with_lambdas_and_selections():
    inner = federated_fn(
        lambda pair: add(pair["b"], double(pair["a"])), {"b": np.float32, "a": np.float32}
    )

    twice = federated_fn(lambda z: add(z, z), np.float32)

    @tff.federated_computation(FLOAT_AT_SERVER, FLOAT_AT_SERVER)
    def outer(x, y):
        zipped = tff.federated_zip({"b": x, "a": y})
        mapped = tff.federated_map(inner, zipped)
        return {"first": mapped, "again": tff.federated_map(twice, mapped)}

    assert outer(1.0, 10.0) == {"first": 21, "again": 42}


def test_a_value_used_twice_is_computed_once(context):
    computation = federated_fn(
        lambda x: (tff.federated_map(double, x), tff.federated_map(double, x)), FLOAT_AT_CLIENTS
    )
    assert computation([1.0]) == ([2], [2])
    assert context.cache_info().compilations == 1


def _secure_modular_sum(x):
    mapreduce = pytest.importorskip(
        "tensorflow_federated.python.core.backends.mapreduce.intrinsics",
        reason="federated-language does not have this intrinsic",
    )
    return mapreduce.federated_secure_modular_sum(x, 8)


SECURE_SUMS = {
    "federated_secure_sum": lambda x: tff.federated_secure_sum(x, 4),
    "federated_secure_sum_bitwidth": lambda x: tff.federated_secure_sum_bitwidth(x, 4),
    "federated_secure_modular_sum": _secure_modular_sum,
}


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_secure_sums_name_themselves_and_who_runs_them(name):
    with pytest.raises(federated.UnsupportedIntrinsicError, match=f" {name};") as caught:
        federated_fn(SECURE_SUMS[name], INT_AT_CLIENTS)([1, 2])
    assert "tff.backends.test.set_sync_test_cpp_execution_context()" in str(caught.value)


@cases.of_tensorflow_federated
@pytest.mark.parametrize("name", SECURE_SUMS)
def test_the_context_named_for_secure_sums_replaces_them(name):
    # What that context does first; running it would start TFF's worker process.
    from tensorflow_federated.python.core.backends.test import compiler

    computation = federated_fn(SECURE_SUMS[name], INT_AT_CLIENTS)
    assert name in str(computation.to_building_block())
    replaced = compiler.replace_secure_intrinsics_with_bodies(computation)
    assert name not in str(replaced.to_building_block())


@pytest.mark.parametrize(("select", "name", "who"), [
    (tff.federated_select, "federated_select", "native.set_sync_local"),
    (tff.federated_secure_select, "federated_secure_select", "test.set_sync_test"),
])  # fmt: skip
def test_selects_name_themselves_and_who_runs_them(select, name, who):
    pick = tff.jax.computation(
        lambda values, index: values[index], tff.TensorType(np.float32, (3,)), np.int32
    )

    def function(keys, top, values):
        return select(keys, top, values, pick)

    computation = federated_fn(
        function,
        tff.FederatedType(tff.TensorType(np.int32, (1,)), tff.CLIENTS),
        tff.FederatedType(np.int32, tff.SERVER),
        tff.FederatedType(tff.TensorType(np.float32, (3,)), tff.SERVER),
    )
    with pytest.raises(federated.UnsupportedIntrinsicError, match=f" {name};") as caught:
        computation([[0]], 3, [1.0, 2.0, 3.0])
    assert f"tff.backends.{who}_cpp_execution_context()" in str(caught.value)


def test_clients_without_a_number_are_refused():
    one = tff.jax.computation(lambda: jnp.float32(1))
    computation = federated_fn(lambda: tff.federated_sum(tff.federated_eval(one, tff.CLIENTS)))
    with pytest.raises(federated.NoClientsError, match="default_num_clients"):
        computation()
    context = federated.create_local_python_execution_context(default_num_clients=5)
    with tff.framework.get_context_stack().install(context):
        assert computation() == 5


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.float16, np.float32])
def test_min_and_max_keep_the_dtype(dtype):
    computation = federated_fn(
        lambda x: (tff.federated_min(x), tff.federated_max(x)),
        tff.FederatedType(dtype, tff.CLIENTS),
    )
    got = computation([dtype(5), dtype(3), dtype(4)])
    assert got == (3, 5)
    assert {value.dtype for value in got} == {np.dtype(dtype)}


def test_min_and_max_do_not_hide_a_nan():
    computation = federated_fn(
        lambda x: (tff.federated_min(x), tff.federated_max(x)), FLOAT_AT_CLIENTS
    )
    assert np.isnan(computation([1.0, np.nan, 2.0])).all()


def test_min_of_a_structure_goes_field_by_field():
    member = collections.OrderedDict(b=np.int32, a=tff.TensorType(np.float32, (2,)))
    computation = federated_fn(tff.federated_min, tff.FederatedType(member, tff.CLIENTS))
    got = computation([{"b": 1, "a": [1.0, 5.0]}, {"a": [2.0, 3.0], "b": 0}])
    assert got["b"] == 0
    np.testing.assert_array_equal(got["a"], [1, 3])


def test_means_of_complex_numbers():
    computation = federated_fn(
        lambda x, w: (tff.federated_mean(x), tff.federated_mean(x, weight=w)),
        tff.FederatedType(np.complex64, tff.CLIENTS),
        FLOAT_AT_CLIENTS,
    )
    assert computation([1 + 1j, 3 - 1j], [1.0, 3.0]) == (2, 2.5 - 0.5j)


def test_weights_before_the_values_bind_by_name():
    computation = federated_fn(
        lambda x: tff.federated_mean(x["value"], weight=x["a_weight"]),
        collections.OrderedDict(value=FLOAT_AT_CLIENTS, a_weight=FLOAT_AT_CLIENTS),
    )
    assert computation(a_weight=[1.0, 3.0], value=[4.0, 8.0]) == 7


def test_the_same_weight_at_all_clients_gives_the_plain_mean():
    computation = federated_fn(
        lambda x, w: tff.federated_mean(x, weight=tff.federated_broadcast(w)),
        FLOAT_AT_CLIENTS,
        FLOAT_AT_SERVER,
    )
    assert computation([1.0, 2.0, 6.0], 5.0) == 3


def test_a_value_may_be_its_own_weight():
    computation = federated_fn(lambda x: tff.federated_mean(x, weight=x), FLOAT_AT_CLIENTS)
    assert computation([1.0, 3.0]) == 2.5


def test_weighted_mean_of_a_thousand_clients_equals_numpy():
    generator = np.random.default_rng(0)
    values = generator.normal(1, 1, 1000).astype(np.float32)
    weights = generator.integers(0, 9, 1000).astype(np.float32)
    np.testing.assert_allclose(
        _weighted_mean(list(values), list(weights)),
        np.average(values.astype(float), weights=weights),
        rtol=1e-5,
    )


def test_weighted_mean_in_half_precision_does_not_overflow():
    half_at_clients = tff.FederatedType(np.float16, tff.CLIENTS)
    computation = federated_fn(
        lambda x, w: tff.federated_mean(x, weight=w), half_at_clients, FLOAT_AT_CLIENTS
    )
    # 60,000 times 3 is more than float16 holds.
    assert computation([np.float16(60000)] * 2, [1.0, 3.0]) == 60000


def test_an_array_may_be_a_federated_value():
    computation = federated_fn(
        lambda: tff.federated_value(np.arange(3, dtype=np.int32), tff.SERVER)
    )
    np.testing.assert_array_equal(computation(), [0, 1, 2])


@pytest.mark.parametrize("num_clients", [1, 2, 9])
def test_every_intrinsic_in_one_program(num_clients):
    data, weights = cases.integral_clients(num_clients)
    cases.check_everything(cases.everything(data, weights, 3.0), data, weights, 3.0)
