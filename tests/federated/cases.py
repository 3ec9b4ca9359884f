"""What several tests of the runtime share: small types, computations and a NumPy reference."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.federated import frontend, tff

of_tensorflow_federated = pytest.mark.skipif(
    frontend.NAME != "tensorflow-federated", reason="is about TFF's own native stack"
)

DIM, CLASSES, BATCH = 3, 2, 4
BATCH_TYPE = collections.OrderedDict(
    pixels=tff.TensorType(np.float32, (BATCH, DIM)), labels=tff.TensorType(np.int32, (BATCH,))
)
MODEL_TYPE = collections.OrderedDict(
    weights=tff.TensorType(np.float32, (DIM, CLASSES)), bias=tff.TensorType(np.float32, (CLASSES,))
)
STEP_SIZE = 0.1


def loss(model, batch):
    """Softmax cross-entropy."""
    log_probs = jax.nn.log_softmax(batch["pixels"] @ model["weights"] + model["bias"])
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["labels"][:, None], axis=1))


def random_batch(generator):
    """One batch of `BATCH_TYPE`."""
    return collections.OrderedDict(
        pixels=generator.normal(size=(BATCH, DIM)).astype(np.float32),
        labels=generator.integers(0, CLASSES, size=BATCH).astype(np.int32),
    )


def random_cohort(generator, lengths):
    """Client data with the given numbers of batches."""
    return [[random_batch(generator) for _ in range(length)] for length in lengths]


def numpy_loss_and_gradient(model, batch):
    """The loss and its gradient in float64 NumPy."""
    logits = batch["pixels"].astype(float) @ model["weights"] + model["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(batch["labels"]))
    residual = np.exp(log_probs)
    residual[rows, batch["labels"]] -= 1
    residual /= len(rows)
    gradient = {"weights": batch["pixels"].astype(float).T @ residual, "bias": residual.sum(axis=0)}
    return -log_probs[rows, batch["labels"]].mean(), gradient


def numpy_train(model, batches, step_size=STEP_SIZE):
    """One pass of SGD in float64 NumPy: the trained model and the loss before each step."""
    model, losses = {name: np.asarray(value, float) for name, value in model.items()}, []
    for batch in batches:
        value, gradient = numpy_loss_and_gradient(model, batch)
        losses.append(value)
        model = {name: model[name] - step_size * gradient[name] for name in model}
    return model, losses


def zeros():
    """A model of zeros."""
    return collections.OrderedDict(
        weights=np.zeros((DIM, CLASSES), np.float32), bias=np.zeros((CLASSES,), np.float32)
    )


FLOATS = tff.SequenceType(np.float32)
add = tff.jax.computation(lambda x, y: x + y, np.float32, np.float32)
multiply = tff.jax.computation(lambda x, y: x * y, np.float32, np.float32)
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


def everything_in_numpy(data, weights, bias):
    """The same as `everything` in NumPy."""
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


@tff.federated_computation(
    tff.FederatedType(np.float32, tff.CLIENTS), tff.FederatedType(FLOATS, tff.SERVER)
)
def scaled_for_each(scales, values):
    """A sequence that all clients share, mapped by each client to one of its own."""
    pairs = tff.federated_zip((scales, tff.federated_broadcast(values)))

    @tff.federated_computation(pairs.type_signature.member)
    def scale(pair):
        times = tff.federated_computation(lambda x: multiply(pair[0], x), np.float32)
        return tff.sequence_map(times, pair[1])

    return tff.federated_map(scale, pairs)


def check_everything(got, data, weights, bias):
    """Compares what `everything` returned to NumPy."""
    for name, value in everything_in_numpy(data, weights, bias).items():
        if name in ("mapped", "data", "zipped"):
            assert got[name] == value, name
        else:
            np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def tensorflow_leaf():
    """A computation whose leaf is of TensorFlow, in as far as a runtime without it can tell."""
    of_jax = tff.framework.serialize_computation(tff.jax.computation(lambda x: x, np.int32))
    proto = type(of_jax)(type=of_jax.type)
    proto.tensorflow.SetInParent()
    return tff.framework.deserialize_computation(proto)


def integral_clients(num_clients):
    """Data (some clients without any) and weights for `everything`, exact in float32."""
    generator = np.random.default_rng(num_clients)
    data = [generator.integers(-9, 9, n % 4).astype(float).tolist() for n in range(num_clients)]
    return data, generator.integers(1, 5, num_clients).astype(float).tolist()
