"""What several tests of the runtime share: small types, computations and a NumPy reference."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from helpers.federated import tff

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
