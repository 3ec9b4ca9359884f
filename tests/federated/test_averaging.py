"""The standard API against NumPy."""

import collections
import typing

import cases
import jax
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


WEIGHTINGS = {
    "uniform": ("uniform", lambda client: 1),
    "examples": ("examples", lambda client: cases.BATCH * len(client)),
    "function": (
        lambda batch: jnp.sum(batch["labels"]),
        lambda client: sum(batch["labels"].sum() for batch in client),
    ),
}


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_two_rounds_under_any_options_equal_numpy(cohort, weighting, rate, metrics):
    option, weight_of = WEIGHTINGS[weighting]
    process = build(client_weighting=option, server_learning_rate=rate, metrics=metrics)
    got, wanted = start(), start()
    for _ in range(2):
        got = process.next(got, cohort)
        if metrics:
            got, _measured = got
        mean = average(
            [cases.numpy_train(wanted, client)[0] for client in cohort],
            [weight_of(client) for client in cohort],
        )
        wanted = {name: (1 - rate) * wanted[name] + rate * mean[name] for name in mean}
    assert type(got) is collections.OrderedDict
    check(got, wanted)


def test_a_mask_weights_padded_batches_by_their_true_examples():
    batch_type = collections.OrderedDict(
        x=tff.TensorType(np.float32, (2,)), mask=tff.TensorType(np.float32, (2,))
    )

    def masked_loss(model, batch):
        return jnp.sum(batch["mask"] * (batch["x"] - model) ** 2) / jnp.sum(batch["mask"])

    process = federated.build_jax_federated_averaging_process(
        batch_type, np.float32, masked_loss, 0.5, client_weighting=lambda b: jnp.sum(b["mask"])
    )
    full, padded = {"x": [1.0, 3.0], "mask": [1.0, 1.0]}, {"x": [8.0, 0.0], "mask": [1.0, 0.0]}
    # A step of 0.5 goes to the mean of the batch: 2 at the first client, 8 at the second.
    assert process.next(0.0, [[full], [padded]]) == (2 * 2 + 1 * 8) / 3


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


class Line(typing.NamedTuple):
    slope: typing.Any
    level: typing.Any


@pytest.mark.parametrize(("model_type", "value"), [
    (Line(np.float32, np.float32), lambda m: m.slope + m.level),
    ([np.float32, (np.float32,)], lambda m: m[0] + m[1][0]),
])  # fmt: skip
def test_the_model_keeps_its_containers(model_type, value):
    process = federated.build_jax_federated_averaging_process(
        tff.TensorType(np.float32, (2,)),
        model_type,
        lambda model, batch: jnp.mean((batch - value(model)) ** 2),
        0.25,
        metrics=True,
    )
    model, _ = process.next(process.initialize(), [[[2.0, 4.0]]])
    wanted = jax.tree_util.tree_map(lambda _: np.float32(1.5), model_type)
    assert model == wanted
    assert type(model) is type(wanted)


@pytest.mark.parametrize("step_size", [0.25, np.float64(0.25), np.float32(0.25)])
def test_a_numpy_step_size_does_not_widen_a_half_precision_model(step_size):
    process = federated.build_jax_federated_averaging_process(
        tff.TensorType(np.float16, (2,)),
        np.float16,
        lambda model, batch: jnp.mean((batch - model) ** 2),
        step_size,
        server_learning_rate=step_size,
    )
    got = process.next(0.0, [[np.array([2, 4], np.float16)]])
    assert (got.dtype, got) == (np.float16, 0.375)


def test_a_weight_that_is_no_single_number_is_refused():
    with pytest.raises(ValueError, match=r"client_weighting must return one number.*shape \[4\]"):
        build(client_weighting=lambda batch: batch["labels"])


def test_a_loss_that_is_no_single_number_is_refused():
    with pytest.raises(TypeError, match="scalar-output"):
        federated.build_jax_federated_averaging_process(
            cases.BATCH_TYPE, cases.MODEL_TYPE, lambda model, batch: model["bias"], 0.1
        )


def test_an_empty_cohort_is_refused_and_the_process_goes_on():
    process = build()
    with pytest.raises(ValueError, match="client_data is an empty cohort"):
        process.next(start(), [])
    check(process.next(start(), [[]]), start())


def test_a_model_without_a_field_is_refused(cohort):
    with pytest.raises(TypeError, match="field model: field 'bias' is missing"):
        build().next({"weights": start()["weights"]}, cohort)


def test_a_round_with_a_thousand_clients_equals_numpy():
    data = np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float32)
    process = federated.build_jax_federated_averaging_process(
        tff.TensorType(np.float32, (2,)),
        np.float32,
        lambda model, batch: jnp.mean((batch - model) ** 2),
        0.25,
    )
    got = process.next(1.0, [[batch] for batch in data])
    np.testing.assert_allclose(got, np.mean((1 + data.astype(float).mean(axis=1)) / 2), rtol=1e-5)
