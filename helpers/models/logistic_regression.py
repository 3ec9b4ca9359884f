"""Bayesian multinomial logistic regression on sharded data.

Weights and bias have standard normal priors and are replicated; examples are sharded:

  weights[dim, classes] ~ Normal(0, 1),  bias[classes] ~ Normal(0, 1),
  labels[i] ~ Categorical(logits = images[i] @ weights + bias).

The model is here twice: as a TFP joint distribution, which says what it is, and as a log density
with a gradient of its own, which is fast. Tests hold the two equal.

What makes it fast. The residual one_hot(label) - softmax(logits) gives value and gradient in one
pass, and one `psum` of one flat vector adds both over devices, where autodiff of the joint
distribution sends one for each part. A matrix product with only `classes` columns is bound by how
it reads the images: with many rows it is fastest along rows in one product and along columns in the
other, from a transposed copy; with few rows in blocks that stay in the cache, without a copy.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from helpers.models import with_gradient

Array = jax.Array

# Up to so many rows a device, blocks without a transposed copy were faster on jax 0.4.30's CPU
# (benchmarks/bench_logistic_regression.py). Above it, the products of 0.4.30 run another way.
_MAX_ROWS_IN_SMALL_BLOCKS = 1024
_SMALL_BLOCK = 250
_MAX_UNROLLED_BLOCKS = 8  # More would only cost compile time: a loop takes over.


def make_joint_distribution(
    images: Array,
    num_classes: int = 10,
    *,
    mask: Array | None = None,
    axis_name: str | None = None,
    pixel_max: float | None = None,
) -> Any:
    """Makes the model, given the images, as a TFP joint distribution of weights, bias and labels.

    Args:
      images: This device's images, float32 or uint8 `[num_examples, dim]`.
      num_classes: How many classes there are.
      mask: Which examples are real, bool `[num_examples]`; all if None.
      axis_name: The mapped axis over which examples are sharded; None if they are all here.
      pixel_max: What to divide images by; 255 for uint8 images if None, else 1.

    Returns:
      `tfp.experimental.distribute.JointDistributionCoroutine` with parts weights `[dim, classes]`,
      bias `[classes]` and labels int32 `[num_examples]`, these `Sharded` if there is an axis.

    Raises:
      ValueError, TypeError: A shape or dtype is not as above.
    """
    from tensorflow_probability.substrates import jax as tfp

    tfd, distribute = tfp.distributions, tfp.experimental.distribute
    root = distribute.JointDistributionCoroutine.Root
    _check_images(images)
    _check_mask(mask, images.shape[0])
    features = _mask_rows(_scale(images, pixel_max), mask)

    def model():
        prior = tfd.Normal(0.0, 1.0)
        shape = (images.shape[1], num_classes)
        weights = yield root(tfd.Sample(prior, shape, name="weights"))
        bias = yield root(tfd.Sample(prior, (num_classes,), name="bias"))
        labels = tfd.Categorical(logits=features @ weights + bias[..., None, :])
        if mask is not None:
            labels = tfd.Masked(labels, mask)
        labels = tfd.Independent(labels, 1, name="labels")
        if axis_name is None:
            yield labels
        else:
            yield distribute.Sharded(labels, shard_axis_name=axis_name, name="labels")

    return distribute.JointDistributionCoroutine(model)


def make_log_density(
    images: Array,
    labels: Array,
    mask: Array | None = None,
    *,
    num_classes: int = 10,
    axis_name: str | None = None,
    pixel_max: float | None = None,
    block_size: int | None = None,
    ordered_sum: bool = False,
) -> Callable[[Array, Array], Array]:
    """Makes the log density of weights and bias given images and labels, with its gradient.

    Call it inside the mapped function and outside of the sampler's loop: what it prepares, such as
    the transposed copy, is then made once. On every device, value and gradient are those of all
    devices' data together.

    Args:
      images: This device's images, float32 or uint8 `[num_examples, dim]`.
      labels: This device's labels, integers `[num_examples]` from 0 to `num_classes` - 1.
      mask: Which examples are real, bool `[num_examples]`; all if None. The others add nothing to
        value or gradient, whatever they hold.
      num_classes: How many classes there are.
      axis_name: The mapped axis over which examples are sharded; None if they are all here.
      pixel_max: What to divide images by; 255 for uint8 images if None, else 1.
      block_size: Rows at a time. Blocks need no transposed copy, and uint8 images stay uint8 but
        for the block in work. None takes blocks of 250 for up to 1024 examples, else all rows at
        once with a transposed copy.
      ordered_sum: Gather the devices' terms and add them in the order of the axis. What a `psum`
        rounds depends on how the devices are connected; this gives the same bits in one process
        and in several, for as many times the communication as there are devices.

    Returns:
      `log_density(weights, bias)`: from float32 `[..., dim, classes]` and `[..., classes]` to
      float32 `[...]`. Leading axes are chains: they make one larger matrix product, as does
      `vmap` over the function.

    Raises:
      ValueError, TypeError: A shape or dtype is not as above; so does the log density.
    """
    _check_images(images)
    num_examples, dim = images.shape
    _check_labels(labels, num_examples)
    _check_mask(mask, num_examples)
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be a positive number of rows, given {block_size}")
    examples = _Examples(images, labels, mask)
    by_blocks = block_size is not None or num_examples <= _MAX_ROWS_IN_SMALL_BLOCKS
    if not by_blocks:
        sums = _sums_with_transposed_copy(examples, num_classes, pixel_max)
    else:
        sums = _sums_by_blocks(examples, num_classes, pixel_max, block_size or _SMALL_BLOCK)

    def value_and_gradient(weights, bias):
        chains = _check_parameters(weights, bias, dim, num_classes)
        # Chains side by side in the columns: one product for all of them.
        columns = weights.reshape(-1, dim, num_classes).transpose(1, 0, 2).reshape(dim, -1)
        flat_bias = bias.reshape(-1, num_classes)
        log_likelihood, by_weights, by_bias = _psum_flat(
            sums(columns, flat_bias), axis_name, ordered_sum
        )
        value = log_likelihood + _log_prior(columns, flat_bias)
        # The prior comes in before the transposition: XLA would fold a transposition into the
        # product before it, and compute that the slow way round.
        by_weights = (by_weights - columns.T).T if by_blocks else by_weights - columns
        by_weights = by_weights.reshape(dim, -1, num_classes).transpose(1, 0, 2)
        gradient = by_weights.reshape(weights.shape), (by_bias - flat_bias).reshape(bias.shape)
        return value.reshape(chains), gradient

    return with_gradient(value_and_gradient)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the posterior draws say of images.

    Attributes:
      probabilities: Class probabilities averaged over draws (the Bayesian model average), float32
        `[num_images, classes]`.
      classes_by_draw: The most probable class of each draw, int32 `[num_draws, num_images]`.
    """

    probabilities: Array
    classes_by_draw: Array


def predict(
    weights: Array,
    bias: Array,
    images: Array,
    *,
    pixel_max: float | None = None,
    draws_per_block: int = 16,
) -> Prediction:
    """Predicts the classes of images by every draw, in one program.

    Args:
      weights: Posterior draws, float32 `[num_draws, dim, classes]`.
      bias: Posterior draws, float32 `[num_draws, classes]`.
      images: float32 or uint8 `[num_images, dim]`.
      pixel_max: What to divide images by; 255 for uint8 images if None, else 1.
      draws_per_block: Draws at a time: the probabilities in memory are float32
        `[num_images, draws_per_block, classes]`.

    Returns:
      The average and each draw's choice.

    Raises:
      ValueError, TypeError: A shape or dtype is not as above.
    """
    _check_images(images)
    if weights.ndim != 3:
        raise ValueError(
            f"weights must be draws [num_draws, {images.shape[1]}, classes], given shape "
            f"{tuple(weights.shape)}; merge the axes of draws and chains first"
        )
    _check_parameters(weights, bias, images.shape[1], weights.shape[-1])
    if not weights.shape[0]:
        raise ValueError("weights hold no draw")
    if draws_per_block < 1:
        raise ValueError(f"draws_per_block must be positive, given {draws_per_block}")
    block = min(draws_per_block, weights.shape[0])
    return Prediction(*_predict(weights, bias, _scale(images, pixel_max), block))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Examples:
    """Images, labels and mask, to be cut together."""

    images: Array
    labels: Array
    mask: Array | None

    def tree_flatten(self):
        return (self.images, self.labels, self.mask), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def map(self, function) -> "_Examples":
        return jax.tree_util.tree_map(function, self)


def _sums_with_transposed_copy(examples, num_classes, pixel_max):
    """Makes the sums over examples; the weights' gradient is `[dim, chains * classes]`."""
    features = _mask_rows(_scale(examples.images, pixel_max), examples.mask)
    transposed = features.T

    def sums(columns, bias):
        log_likelihood, residual = _residual(features @ columns, bias, examples, num_classes)
        return log_likelihood, transposed @ residual, _sum_by_class(residual, num_classes)

    return sums


def _sums_by_blocks(examples, num_classes, pixel_max, block_size):
    """Makes the sums over examples; the weights' gradient is `[chains * classes, dim]`."""
    num_examples = examples.images.shape[0]
    num_blocks = num_examples // block_size
    if num_blocks > _MAX_UNROLLED_BLOCKS:
        # The first block starts the sums, the last one holds the rest.
        starts = [0, *([num_blocks * block_size] if num_examples % block_size else [])]
    else:
        starts = range(0, num_examples, block_size)
    # Cut here and not in `sums`: here it is outside of the sampler's loop.
    blocks = [examples.map(lambda x, i=start: x[i : i + block_size]) for start in starts]

    def block_sums(block, columns, bias):
        features = _mask_rows(_scale(block.images, pixel_max), block.mask)
        log_likelihood, residual = _residual(features @ columns, bias, block, num_classes)
        return log_likelihood, residual.T @ features, _sum_by_class(residual, num_classes)

    def sums(columns, bias):
        total = block_sums(blocks[0], columns, bias)
        for block in blocks[1:]:
            total = _add(total, block_sums(block, columns, bias))
        if num_blocks <= _MAX_UNROLLED_BLOCKS:
            return total

        def add_block(index, total):
            start = index * block_size
            block = examples.map(lambda x: lax.dynamic_slice_in_dim(x, start, block_size))
            return _add(total, block_sums(block, columns, bias))

        return lax.fori_loop(1, num_blocks, add_block, total)

    return sums


def _residual(logits, bias, examples, num_classes):
    """Log likelihood `[chains]` and its gradient by the logits `[num_examples, chains * classes]`.

    Args:
      logits: `[num_examples, chains * classes]`, without the bias.
      bias: `[chains, classes]`.
      examples: Labels and mask.
      num_classes: classes.
    """
    logits = logits.reshape(logits.shape[0], -1, num_classes) + bias
    logits = logits - logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits)
    normalizers = exponentials.sum(-1, keepdims=True)
    one_hot = (examples.labels[:, None, None] == jnp.arange(num_classes)).astype(logits.dtype)
    log_likelihood = (logits * one_hot).sum(-1) - jnp.log(normalizers[..., 0])
    residual = one_hot - exponentials / normalizers
    if examples.mask is not None:
        log_likelihood = jnp.where(examples.mask[:, None], log_likelihood, 0)
        residual = jnp.where(examples.mask[:, None, None], residual, 0)
    return log_likelihood.sum(0), residual.reshape(residual.shape[0], -1)


def _sum_by_class(residual, num_classes):
    return residual.sum(0).reshape(-1, num_classes)


def _log_prior(columns, bias):
    """Standard normal log density `[chains]` of weights `[dim, chains * classes]` and bias."""
    by_chain = (columns * columns).sum(0).reshape(bias.shape) + bias * bias
    count = (columns.shape[0] + 1) * bias.shape[1]
    return -0.5 * by_chain.sum(-1) - 0.5 * count * math.log(2 * math.pi)


def _psum_flat(parts, axis_name, ordered):
    """Sums arrays over devices with one collective, not one an array: its start is what costs."""
    if axis_name is None:
        return parts
    flat = jnp.concatenate([part.ravel() for part in parts])
    total = lax.all_gather(flat, axis_name).sum(0) if ordered else lax.psum(flat, axis_name)
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [x.reshape(part.shape) for x, part in zip(jnp.split(total, ends), parts)]


def _add(left, right):
    return jax.tree_util.tree_map(jnp.add, left, right)


def _scale(images, pixel_max):
    if pixel_max is None:
        pixel_max = 255 if images.dtype == jnp.uint8 else 1
    features = jnp.asarray(images, jnp.float32)
    return features if pixel_max == 1 else features * np.float32(1 / pixel_max)


def _mask_rows(features, mask):
    # Not only the residual: zero times a NaN in a row of padding would be NaN in the product.
    return features if mask is None else jnp.where(mask[:, None], features, 0)


def _predict_block(total, block, features):
    weights, bias, counts = block
    num_draws, dim, num_classes = weights.shape
    logits = features @ weights.transpose(1, 0, 2).reshape(dim, -1)
    logits = logits.reshape(-1, num_draws, num_classes) + bias
    probabilities = jax.nn.softmax(logits)
    total = total + jnp.einsum("nbc,b->nc", probabilities, counts)
    return total, logits.argmax(-1).T.astype(jnp.int32)


def _predict_impl(weights, bias, features, block):
    num_draws, _, num_classes = weights.shape
    num_blocks = -(-num_draws // block)
    missing = num_blocks * block - num_draws
    counts = jnp.ones(num_draws, jnp.float32)

    def cut(x):
        padded = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(num_blocks, block, *x.shape[1:])

    total, classes = lax.scan(
        lambda total, part: _predict_block(total, part, features),
        jnp.zeros((features.shape[0], num_classes), jnp.float32),
        (cut(weights), cut(bias), cut(counts)),
    )
    classes = classes.reshape(num_blocks * block, features.shape[0])[:num_draws]
    return total / num_draws, classes


_predict = jax.jit(_predict_impl, static_argnums=3)


def _check_images(images):
    if images.ndim != 2 or not images.size:
        raise ValueError(
            f"images must be [num_examples, dim] and not empty, given shape {tuple(images.shape)}; "
            "flatten each image to a row first"
        )
    if images.dtype not in (jnp.float32, jnp.uint8):
        raise TypeError(f"images must be float32 or uint8, given {images.dtype}")


def _check_labels(labels, num_examples):
    if labels.shape != (num_examples,):
        raise ValueError(
            f"labels must be [{num_examples}], one an image, given shape {tuple(labels.shape)}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, given {labels.dtype}")


def _check_mask(mask, num_examples):
    if mask is not None and (mask.shape != (num_examples,) or mask.dtype != bool):
        raise ValueError(
            f"mask must be bool [{num_examples}], given {mask.dtype} {list(mask.shape)}"
        )


def _check_parameters(weights, bias, dim, num_classes):
    """Returns the shape of the chains."""
    chains = tuple(weights.shape[:-2])
    expected = (*chains, dim, num_classes), (*chains, num_classes)
    given = tuple(weights.shape), tuple(bias.shape)
    if given != expected:
        raise ValueError(
            f"weights and bias must be [..., {dim}, {num_classes}] and [..., {num_classes}] with "
            f"the same leading axes, given shapes {given[0]} and {given[1]}"
        )
    return chains
