"""The debug mode: the same results, and a place for the first NaN or error."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import federated
from helpers.federated import hlo, tff


@pytest.fixture
def process():
    return federated.build_jax_federated_averaging_process(
        cases.BATCH_TYPE, cases.MODEL_TYPE, cases.loss, cases.STEP_SIZE, metrics=True
    )


@pytest.mark.parametrize("num_clients", [1, 5])
def test_debugging_covers_every_intrinsic(debug, num_clients):
    data, weights = cases.integral_clients(num_clients)
    got = cases.everything(data, weights, 3.0)
    cases.check_everything(got, data, weights, 3.0)
    assert debug.cache_info().compilations == 0


def test_debugging_gives_the_same_results(process, debug):
    cohort = cases.random_cohort(np.random.default_rng(0), [2, 0, 3])
    slow_model, slow_metrics = process.next(cases.zeros(), cohort)
    fused = federated.create_local_python_execution_context()
    with tff.framework.get_context_stack().install(fused):
        model, metrics = process.next(cases.zeros(), cohort)
    np.testing.assert_allclose(slow_model["weights"], model["weights"], rtol=1e-5, atol=1e-7)
    assert slow_metrics["num_batches"] == metrics["num_batches"] == 5
    assert debug.cache_info().compilations == 0


def test_the_first_nan_is_named_with_client_and_batch(process, debug):
    cohort = cases.random_cohort(np.random.default_rng(0), [2, 3, 3])
    cohort[1][2]["pixels"][0, 0] = np.inf
    cohort[2][0]["pixels"][0, 0] = np.inf
    with pytest.raises(FloatingPointError, match=r"client 1, batch 2, in .* train_and_measure"):
        process.next(cases.zeros(), cohort)


def test_a_nan_at_the_server_is_named_so(debug):
    root = tff.jax.computation(lambda x: jnp.sqrt(x), np.float32)
    with pytest.raises(FloatingPointError, match="at the server"):
        root(-1.0)


def test_a_nan_that_came_in_is_not_reported(debug):
    double = tff.jax.computation(lambda x: 2 * x, np.float32)
    assert np.isnan(double(np.nan))


def test_an_error_is_named_with_client_and_batch(process, debug, monkeypatch):
    calls = []

    def fail_at_fifth(leaf, arguments, run=hlo.Leaf.__call__):
        calls.append(leaf.name)
        if calls.count("train_and_measure") == 5:
            raise MemoryError("out of memory")
        return run(leaf, *arguments)

    monkeypatch.setattr(
        hlo.Leaf, "__call__", lambda leaf, *arguments: fail_at_fifth(leaf, arguments)
    )
    cohort = cases.random_cohort(np.random.default_rng(0), [3, 3])
    with pytest.raises(
        RuntimeError, match=r"train_and_measure failed at client 1, batch 1: out of"
    ):
        process.next(cases.zeros(), cohort)


LOGS = tff.SequenceType(np.float32)
log = tff.jax.computation(lambda x: jnp.log(x), np.float32)


@pytest.mark.usefixtures("debug")
def test_a_nan_in_a_mapped_sequence_is_named_with_client_and_batch():
    logs = tff.federated_computation(lambda values: tff.sequence_map(log, values), LOGS)
    computation = tff.federated_computation(
        lambda data: tff.federated_map(logs, data), tff.FederatedType(LOGS, tff.CLIENTS)
    )
    with pytest.raises(FloatingPointError, match="client 2, batch 1, in"):
        computation([[1.0], [], [1.0, -1.0]])


def test_a_nan_in_an_aggregation_is_named_with_the_client(debug):
    add_log = tff.jax.computation(lambda total, x: total + jnp.log(x), np.float32, np.float32)
    computation = tff.federated_computation(
        lambda x: tff.federated_aggregate(x, np.float32(0), add_log, cases.add, cases.double),
        tff.FederatedType(np.float32, tff.CLIENTS),
    )
    with pytest.raises(FloatingPointError, match="client 1, in"):
        computation([1.0, -1.0])
    assert computation([1.0, 1.0]) == 0


@pytest.mark.usefixtures("debug")
def test_an_infinity_is_no_nan():
    assert log(0.0) == -np.inf


@pytest.mark.usefixtures("debug")
def test_debugging_works_where_jit_is_switched_off():
    with jax.disable_jit():
        assert cases.double(2.0) == 4


def test_a_device_value_of_the_debug_context(debug):
    value = debug.device_put([1.0, 2.0], tff.FederatedType(np.float32, tff.CLIENTS))
    computation = tff.federated_computation(
        tff.federated_sum, tff.FederatedType(np.float32, tff.CLIENTS)
    )
    assert computation(value) == 3
