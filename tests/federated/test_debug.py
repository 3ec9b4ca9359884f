"""The debug mode: the same results, and a place for the first NaN or error."""

import cases
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
