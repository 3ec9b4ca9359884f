"""Run by test_devices with eight forced CPU devices: clients spread over some of them."""

import cases
import jax
import numpy as np
import pytest

from helpers import federated
from helpers.federated import tff

FLOATS = tff.SequenceType(np.float32)
add = tff.jax.computation(lambda x, y: x + y, np.float32, np.float32)
double = tff.jax.computation(lambda x: 2 * x, np.float32)


@tff.federated_computation(FLOATS)
def total(values):
    return tff.sequence_reduce(values, np.float32(0), add)


@tff.federated_computation(FLOATS)
def doubled(values):
    return tff.sequence_map(double, values)


@tff.federated_computation(
    tff.FederatedType(FLOATS, tff.CLIENTS),
    tff.FederatedType(np.float32, tff.CLIENTS),
    tff.FederatedType(np.float32, tff.SERVER),
)
def everything(data, weights, bias):
    sums = tff.federated_map(total, data)
    shifted = tff.federated_map(add, (sums, tff.federated_broadcast(bias)))
    return {
        "each": shifted,
        "sum": tff.federated_sum(shifted),
        "min": tff.federated_min(shifted),
        "max": tff.federated_max(shifted),
        "mean": tff.federated_mean(shifted),
        "weighted": tff.federated_mean(shifted, weight=weights),
        "aggregate": tff.federated_aggregate(shifted, np.float32(0), add, add, double),
        "mapped": tff.federated_map(doubled, data),
        "data": data,
        "zipped": tff.federated_zip((weights, tff.federated_broadcast(bias))),
        "server": tff.federated_map(double, bias),
    }


def reference(data, weights, bias):
    """The same in NumPy."""
    shifted = np.array([sum(client) + bias for client in data])
    return {
        "each": shifted.tolist(),
        "sum": shifted.sum(),
        "min": shifted.min(),
        "max": shifted.max(),
        "mean": shifted.mean(),
        "weighted": np.average(shifted, weights=weights),
        "aggregate": 2 * shifted.sum(),
        "mapped": [[2 * x for x in client] for client in data],
        "data": data,
        "zipped": [(weight, bias) for weight in weights],
        "server": 2 * bias,
    }


def check_intrinsics(devices, num_clients):
    """All intrinsics at one size of the cohort, given as Python values and from the devices."""
    generator = np.random.default_rng(num_clients)
    data = [generator.integers(-9, 9, n % 4).astype(float).tolist() for n in range(num_clients)]
    weights = generator.integers(1, 5, num_clients).astype(float).tolist()
    context = federated.create_local_python_execution_context(devices=devices)
    with tff.framework.get_context_stack().install(context):
        got = everything(data, weights, 3.0)
        data_type = everything.type_signature.parameter[0]
        again = everything(context.device_put(data, data_type), weights, 3.0)
    wanted = reference(data, weights, 3.0)
    for result in (got, again):
        for name, value in wanted.items():
            if name in ("mapped", "data", "zipped"):
                assert result[name] == value, (num_clients, name, result[name], value)
            else:
                np.testing.assert_allclose(result[name], value, rtol=1e-5, err_msg=name)


def check_training(devices, num_clients):
    """A round over all devices equals the round on one, to float32 rounding."""
    process = federated.build_jax_federated_averaging_process(
        cases.BATCH_TYPE,
        cases.MODEL_TYPE,
        cases.loss,
        0.1,
        client_weighting="examples",
        metrics=True,
    )
    cohort = cases.random_cohort(
        np.random.default_rng(0), [n % 5 for n in range(1, num_clients + 1)]
    )
    results = []
    for used in (devices, devices[:1], devices[-1:]):
        context = federated.create_local_python_execution_context(devices=used)
        with tff.framework.get_context_stack().install(context):
            results.append(process.next(cases.zeros(), cohort))
    for other in results[1:]:
        for one, two in zip(
            jax.tree_util.tree_leaves(results[0]), jax.tree_util.tree_leaves(other)
        ):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def check_spread(devices):
    """Client values really lie on all devices."""
    context = federated.create_local_python_execution_context(devices=devices)
    value = context.device_put(
        [float(n) for n in range(2 * len(devices))], tff.FederatedType(np.float32, tff.CLIENTS)
    )
    assert value.placed.value.sharding.device_set == set(devices)


def check_foreign_device_value(devices):
    """A value put on the devices of another context is refused."""
    one = federated.create_local_python_execution_context(devices=devices[:1])
    type_spec = tff.FederatedType(np.float32, tff.CLIENTS)
    value = one.device_put([1.0, 2.0], type_spec)
    computation = tff.federated_computation(lambda x: tff.federated_sum(x), type_spec)
    context = federated.create_local_python_execution_context(devices=devices)
    with (
        tff.framework.get_context_stack().install(context),
        pytest.raises(ValueError, match="device_put"),
    ):
        computation(value)


assert jax.device_count() == 8, jax.devices()
assert federated.create_local_python_execution_context().devices == tuple(jax.devices())
for count in (2, 3, 8):
    used = jax.devices()[:count]
    for num_clients in sorted({1, 2, count, count + 1, 3 * count + 2}):
        check_intrinsics(used, num_clients)
    check_training(used, 2 * count + 1)
    check_spread(used)
    check_foreign_device_value(used)
    print("all checks passed on", count, "devices")
