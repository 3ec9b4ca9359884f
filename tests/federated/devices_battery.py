"""Run by test_devices with eight forced CPU devices: clients spread over some of them."""

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers import federated
from helpers.federated import tff
from helpers.federated.jax_internals import enable_x64

AT_CLIENTS = tff.FederatedType(np.float32, tff.CLIENTS)
AT_SERVER = tff.FederatedType(np.float32, tff.SERVER)


def on(devices, **options):
    """Creates a context on devices and installs it."""
    context = federated.create_local_python_execution_context(devices=devices, **options)
    return context, tff.framework.get_context_stack().install(context)


def check_intrinsics(devices, num_clients):
    """All intrinsics at one size of the cohort, given as Python values and from the devices."""
    data, weights = cases.integral_clients(num_clients)
    context, installed = on(devices)
    types = [
        field for _, field in tff.structure.to_elements(cases.everything.type_signature.parameter)
    ]
    with installed:
        cases.check_everything(cases.everything(data, weights, 3.0), data, weights, 3.0)
        placed = [context.device_put(*pair) for pair in zip((data, weights, 3.0), types)]
        cases.check_everything(cases.everything(*placed), data, weights, 3.0)
        scales = [float(n) for n in range(num_clients)]
        wanted = [[scale, 2 * scale] for scale in scales]
        assert cases.scaled_for_each(scales, [1.0, 2.0]) == wanted
    assert context.cache_info().compilations == 2


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


def check_results_as_arguments(devices):
    """Results that stay on the devices may go into a call with another number of clients."""

    @tff.federated_computation(AT_SERVER, AT_CLIENTS)
    def add_all(start, values):
        total = tff.federated_sum(values)
        return tff.federated_map(cases.add, (start, total))

    total, used = 0.0, []
    with on(devices, device_results=True)[1]:
        for num_clients in (len(devices), 1, len(devices) + 1):
            total = add_all(total, [1.0] * num_clients)
            used.append(len(total.devices()))
        assert total == 2 * len(devices) + 2
        assert used == [len(devices), 1, len(devices)]
        elsewhere = jax.device_put(np.float32(5), jax.devices()[-1])
        assert add_all(elsewhere, [1.0] * len(devices)) == 5 + len(devices)


def check_dtypes(devices):
    """Reductions over devices in every dtype that TFF reduces."""
    num_clients = len(devices) + 1
    for dtype in (np.int8, np.uint16, np.uint32, np.float16, ml_dtypes.bfloat16, np.complex64):
        with on(devices)[1]:
            summed = tff.federated_computation(
                tff.federated_sum, tff.FederatedType(dtype, tff.CLIENTS)
            )
            got = summed([dtype(1)] * num_clients)
        assert (got.dtype, got) == (np.dtype(dtype), num_clients), dtype


def check_aggregate_of_structs(devices):
    """Aggregation of flags and vectors, whose accumulators meet in `merge`."""
    zero = tff.jax.computation(lambda: {"any": jnp.bool_(False), "sum": jnp.zeros(2)})
    state = zero.type_signature.result
    accumulate = tff.jax.computation(
        lambda s, x: {"any": s["any"] | (x > 2), "sum": s["sum"] + x}, state, np.float32
    )
    merge = tff.jax.computation(
        lambda s, t: {"any": s["any"] | t["any"], "sum": s["sum"] + t["sum"]}, state, state
    )
    report = tff.jax.computation(lambda s: s, state)
    aggregate = tff.federated_computation(
        lambda x: tff.federated_aggregate(x, zero(), accumulate, merge, report), AT_CLIENTS
    )
    with on(devices)[1]:
        got = aggregate([1.0, 2.0, 3.0, 4.0])
    assert got["any"]
    np.testing.assert_array_equal(got["sum"], [10, 10])


def check_aggregate_of_nothing(devices):
    """An accumulator without any tensor."""
    nothing = tff.StructType([])
    aggregate = tff.federated_computation(
        lambda x, zero: tff.federated_aggregate(
            x,
            zero,
            tff.federated_computation(lambda s, x: s, nothing, np.float32),
            tff.federated_computation(lambda s, t: s, nothing, nothing),
            tff.federated_computation(lambda s: s, nothing),
        ),
        AT_CLIENTS,
        nothing,
    )
    with on(devices)[1]:
        assert aggregate([1.0, 2.0, 3.0], ()) == ()


def check_lapack(devices):
    """A leaf with a custom call, at each client."""
    matrix = tff.TensorType(np.float32, (2, 2))
    root = tff.jax.computation(lambda x: jnp.linalg.cholesky(x), matrix)
    mean = tff.federated_computation(
        lambda x: tff.federated_mean(tff.federated_map(root, x)),
        tff.FederatedType(matrix, tff.CLIENTS),
    )
    with on(devices)[1]:
        got = mean([4 * n**2 * np.eye(2, dtype=np.float32) for n in range(1, 5)])
    np.testing.assert_allclose(got, 5 * np.eye(2), rtol=1e-5)


def check_default_clients(devices):
    """Clients that no argument counts."""
    total = tff.federated_computation(
        lambda: tff.federated_sum(tff.federated_value(2, tff.CLIENTS))
    )
    with on(devices, default_num_clients=len(devices) + 2)[1]:
        assert total() == 2 * (len(devices) + 2)


def check_64_bits(devices):
    """64-bit numbers, where they are switched on for this thread only."""
    with on(devices)[1], enable_x64(True):
        total = tff.federated_computation(
            tff.federated_sum, tff.FederatedType(np.int64, tff.CLIENTS)
        )
        assert total([2**40] * len(devices)) == 2**40 * len(devices)


assert jax.device_count() == 8, jax.devices()
assert federated.create_local_python_execution_context().devices == tuple(jax.devices())
for count in (2, 3, 8):
    used = jax.devices()[:count]
    for num_clients in (count - 1, count, 3 * count + 2):
        check_intrinsics(used, num_clients)
    check_training(used, 2 * count + 1)
    check_spread(used)
    check_foreign_device_value(used)
    check_results_as_arguments(used)
    if count == 3:  # One number of devices is enough where nothing is split by their number.
        check_dtypes(used)
        check_aggregate_of_structs(used)
        check_aggregate_of_nothing(used)
        check_lapack(used)
        check_default_clients(used)
        check_64_bits(used)
    print("all checks passed on", count, "devices")
