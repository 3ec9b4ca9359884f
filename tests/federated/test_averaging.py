"""The standard API against NumPy."""

import collections

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import federated
from helpers.federated import tff


def build(**options):
    """A process for the small model."""
    return federated.build_jax_federated_averaging_process(
        cases.BATCH_TYPE, cases.MODEL_TYPE, cases.loss, cases.STEP_SIZE, **options
    )


@pytest.fixture
def cohort():
    return cases.random_cohort(np.random.default_rng(1), [2, 0, 5, 1])


def start():
    """A model that is not zero."""
    generator = np.random.default_rng(7)
    return collections.OrderedDict(
        weights=generator.normal(size=(cases.DIM, cases.CLASSES)).astype(np.float32),
        bias=generator.normal(size=cases.CLASSES).astype(np.float32),
    )


def check(got, wanted):
    """Compares models to float32 rounding."""
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-6)


def average(models, weights):
    """The weighted mean of NumPy models."""
    return {
        name: np.average([model[name] for model in models], axis=0, weights=weights)
        for name in cases.MODEL_TYPE
    }


def test_initialize_gives_zeros_of_the_model_type():
    model = build().initialize()
    assert type(model) is collections.OrderedDict
    assert list(model) == ["weights", "bias"]
    check(model, cases.zeros())


def test_it_is_an_iterative_process_of_the_original_type():
    process = build()
    assert isinstance(process, tff.templates.IterativeProcess)
    model = tff.FederatedType(tff.to_type(cases.MODEL_TYPE), tff.SERVER)
    data = tff.FederatedType(tff.SequenceType(cases.BATCH_TYPE), tff.CLIENTS)
    assert process.initialize.type_signature == tff.FunctionType(None, model)
    expected = tff.FunctionType([("model", model), ("client_data", data)], model)
    assert process.next.type_signature.is_equivalent_to(expected)


@pytest.mark.parametrize("metrics", [False, True])
def test_a_round_is_the_plain_mean_of_the_trained_models(cohort, metrics):
    got = build(metrics=metrics).next(start(), cohort)
    model = got[0] if metrics else got
    check(model, average([cases.numpy_train(start(), c)[0] for c in cohort], None))


@pytest.mark.parametrize("metrics", [False, True])
def test_weighted_by_examples_a_client_counts_by_its_data(cohort, metrics):
    got = build(client_weighting="examples", metrics=metrics).next(start(), cohort)
    model = got[0] if metrics else got
    check(model, average([cases.numpy_train(start(), c)[0] for c in cohort], [2, 0, 5, 1]))


def test_weighted_by_a_function_of_the_batch(cohort):
    process = build(client_weighting=lambda batch: jnp.sum(batch["labels"]))
    weights = [sum(batch["labels"].sum() for batch in client) for client in cohort]
    check(
        process.next(start(), cohort),
        average([cases.numpy_train(start(), c)[0] for c in cohort], weights),
    )


def test_the_server_learning_rate_scales_the_step(cohort):
    mean = average([cases.numpy_train(start(), c)[0] for c in cohort], None)
    wanted = {name: start()[name] + 0.5 * (mean[name] - start()[name]) for name in mean}
    check(build(server_learning_rate=0.5).next(start(), cohort), wanted)


def test_a_round_without_any_example_leaves_the_model_alone():
    model, metrics = build(client_weighting="examples", metrics=True).next(start(), [[], []])
    check(model, start())
    assert metrics == {"loss": 0, "num_batches": 0, "num_clients": 2, "weight": 0}


def test_metrics_tell_what_happened(cohort):
    _, metrics = build(client_weighting="examples", metrics=True).next(start(), cohort)
    losses = [value for client in cohort for value in cases.numpy_train(start(), client)[1]]
    assert list(metrics) == ["loss", "num_batches", "num_clients", "weight"]
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    assert metrics["num_batches"] == 8
    assert metrics["num_clients"] == 4
    assert metrics["weight"] == 8 * cases.BATCH


def test_a_model_that_is_one_tensor():
    process = federated.build_jax_federated_averaging_process(
        tff.TensorType(np.float32, (2,)),
        np.float32,
        lambda model, batch: jnp.mean((batch - model) ** 2),
        0.25,
    )
    assert process.initialize() == 0
    assert process.next(0.0, [[[2.0, 4.0]]]) == 1.5


@pytest.mark.parametrize(("options", "error"), [
    ({"step_size": 0}, ValueError), ({"step_size": -1.0}, ValueError),
    ({"step_size": float("nan")}, ValueError), ({"step_size": float("inf")}, ValueError),
    ({"step_size": "0.1"}, ValueError), ({"server_learning_rate": 0.0}, ValueError),
    ({"client_weighting": "example"}, ValueError),
])  # fmt: skip
def test_bad_options_are_refused_by_name(options, error):
    arguments = {"step_size": 0.1, **options}
    with pytest.raises(error, match=next(iter(options))):
        federated.build_jax_federated_averaging_process(
            cases.BATCH_TYPE, cases.MODEL_TYPE, cases.loss, **arguments
        )


def test_a_model_of_integers_is_refused():
    with pytest.raises(TypeError, match="model_type must be a float tensor"):
        federated.build_jax_federated_averaging_process(
            cases.BATCH_TYPE, {"n": np.int32}, cases.loss, 0.1
        )


def test_examples_cannot_be_counted_without_a_leading_axis():
    with pytest.raises(ValueError, match="needs one leading axis"):
        federated.build_jax_federated_averaging_process(
            {"x": np.float32}, {"w": np.float32}, lambda m, b: m["w"], 0.1,
            client_weighting="examples",
        )  # fmt: skip
