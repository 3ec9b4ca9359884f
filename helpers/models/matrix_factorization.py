"""Bayesian matrix factorization of who watched what, with users sharded over devices.

A user and a movie meet in the logit of an entry of the watch matrix, in any part normal at first:

  users[i, :], user_bias[i], movies[j, :], movie_bias[j] ~ Normal(0, prior_scale),
  watched[i, j] ~ Bernoulli(logits = users[i] @ movies[j] + user_bias[i] + movie_bias[j]).

Users and their rows of the watch matrix lie on one device, movies on every one. So the gradient of
the users needs no communication, and that of the movies a sum over devices. Parts are in the order
above without exception: sharded ones first, which spares TFP's joint distributions a `psum` a part
(it sums the gradient of each replicated part that precedes a sharded one).

The model is here twice: as a TFP joint distribution, which says what it is, and as a log density
with a gradient of its own, which is fast. Tests hold the two equal.

What makes it fast. Value and gradient come from one pass over blocks of rows that stay in the
cache: logits, then log likelihood and residual from one exponential, then both products with the
residual. Sixteen terms 1 + exp(-|logit|), which lie between 1 and 2, are multiplied before one
logarithm is taken of them. Biases are a column more in the products. Nothing as large as the
matrix of logits is ever in memory, and the watch matrix keeps its byte an entry.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from helpers.models import with_gradient

Array = jax.Array

# float32 entries of a block: 2.4 MB. On two cores anything from half to twice of it was as fast.
_BLOCK_ENTRIES = 600_000
_MIN_BLOCK_ROWS = 16  # Below it, adding up the movies' gradient costs more than the products.
_TERMS_PER_LOGARITHM = 16  # Up to 127 terms of at most 2 are finite in float32.
_LOGIT_OF_PADDING = -1e4  # exp is 0: the log likelihood of "not watched" and its gradient are too.


def make_joint_distribution(
    num_users: int,
    num_movies: int,
    dim: int,
    *,
    prior_scale: float = 1.0,
    mask: Array | None = None,
    axis_name: str | None = None,
) -> Any:
    """Makes the model as a TFP joint distribution of parameters and watch matrix.

    Args:
      num_users: Users on this device.
      num_movies: All movies.
      dim: Length of a user's and of a movie's vector.
      prior_scale: Standard deviation of every parameter's prior.
      mask: Which users are real, bool `[num_users]`; all if None. The others have log density 0,
        and zeros are drawn for them.
      axis_name: The mapped axis over which users are sharded; None if they are all here.

    Returns:
      `tfp.experimental.distribute.JointDistributionCoroutine` with parts users `[num_users, dim]`,
      user_bias `[num_users]`, movies `[num_movies, dim]`, movie_bias `[num_movies]` and watched
      uint8 `[num_users, num_movies]`; the first two and the last are `Sharded` if there is an axis.

    Raises:
      ValueError: A number is not positive, or the mask has another shape or dtype.
    """
    from tensorflow_probability.substrates import jax as tfp

    tfd, distribute = tfp.distributions, tfp.experimental.distribute
    root = distribute.JointDistributionCoroutine.Root
    _check_sizes(num_users=num_users, num_movies=num_movies, dim=dim)
    _check_prior_scale(prior_scale)
    _check_mask(mask, num_users)

    def model():
        users, user_bias, movies, movie_bias = _normal_parts(
            num_users, num_movies, dim, prior_scale, mask, axis_name
        )
        users = yield root(users)
        user_bias = yield root(user_bias)
        movies = yield root(movies)
        movie_bias = yield root(movie_bias)
        logits = jnp.einsum("...ik,...jk->...ij", users, movies)
        logits = logits + user_bias[..., :, None] + movie_bias[..., None, :]
        watched = tfd.Bernoulli(logits=logits, dtype=jnp.uint8)
        yield _by_user(watched, 2, mask, axis_name, "watched")

    return distribute.JointDistributionCoroutine(model)


def make_momentum_distribution(
    num_users: int,
    num_movies: int,
    dim: int,
    *,
    mask: Array | None = None,
    axis_name: str | None = None,
) -> Any:
    """Makes standard normal momenta for `PreconditionedHamiltonianMonteCarlo`.

    Those of users are `Sharded`. They differ from device to device though the devices share a key,
    and the kinetic energy counts all of them. With momenta that are not sharded, users at the same
    place of two devices get the same momentum, and each device accepts or rejects by a kinetic
    energy of its own: the movies are no longer the same everywhere.

    Momenta of masked users are 0. As nothing pulls at them either, they stay where they are.

    Args:
      num_users: Users on this device.
      num_movies: All movies.
      dim: Length of a user's and of a movie's vector.
      mask: Which users are real, bool `[num_users]`; all if None.
      axis_name: The mapped axis over which users are sharded; None if they are all here.

    Returns:
      `tfp.experimental.distribute.JointDistributionSequential` with parts as the parameters, one
      chain's; the kernel adds the axes of chains.

    Raises:
      ValueError: A number is not positive, or the mask has another shape or dtype.
    """
    from tensorflow_probability.substrates import jax as tfp

    _check_sizes(num_users=num_users, num_movies=num_movies, dim=dim)
    _check_mask(mask, num_users)
    parts = _normal_parts(num_users, num_movies, dim, 1.0, mask, axis_name)
    return tfp.experimental.distribute.JointDistributionSequential(parts)


def make_initial_state(
    mask: Any,
    num_movies: int,
    dim: int,
    *,
    num_chains: int,
    seed: int,
    scale: float = 0.1,
) -> list[np.ndarray]:
    """Draws where chains start, for `sampling.sample` with `replicated=[False, False, True, True]`.

    Users get the same numbers on any number of devices. All zeros would be a bad start: it is a
    stationary point of the vectors of users and movies.

    Args:
      mask: Which users are real, bool `[num_devices, users_per_device]`, as from `sharding.shard`;
        the others start, and stay, at 0.
      num_movies: All movies.
      dim: Length of a user's and of a movie's vector.
      num_chains: Chains.
      seed: Of NumPy's generator.
      scale: Standard deviation, small against the prior's so that no logit is large.

    Returns:
      users `[num_devices, num_chains, users_per_device, dim]`, user_bias
      `[num_devices, num_chains, users_per_device]`, movies `[num_chains, num_movies, dim]` and
      movie_bias `[num_chains, num_movies]`, float32.

    Raises:
      ValueError: A number is not positive, or the mask has another shape or dtype.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.dtype != bool or not mask.any():
        raise ValueError(
            "mask must be bool [num_devices, users_per_device] with a real user, given "
            f"{mask.dtype} {list(mask.shape)}"
        )
    _check_sizes(num_movies=num_movies, dim=dim, num_chains=num_chains)
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (scale * rng.standard_normal((num_chains, *shape))).astype(np.float32)

    def spread(values):
        padded = np.zeros((*mask.shape, *values.swapaxes(0, 1).shape[1:]), np.float32)
        padded[mask] = values.swapaxes(0, 1)
        return padded.swapaxes(1, 2)

    num_users = int(mask.sum())
    users, user_bias = spread(normal(num_users, dim)), spread(normal(num_users))
    return [users, user_bias, normal(num_movies, dim), normal(num_movies)]


def make_log_density(
    watched: Array,
    mask: Array | None = None,
    *,
    prior_scale: float = 1.0,
    axis_name: str | None = None,
    block_size: int | None = None,
) -> Callable[[Array, Array, Array, Array], Array]:
    """Makes the log density of the parameters given the watch matrix, with its gradient.

    Call it inside the mapped function and outside of the sampler's loop. On every device the value
    is that of all users, and the gradient that of this value by this device's users and by the
    movies.

    A masked user adds nothing to value or gradient, neither to likelihood nor to prior, whatever
    the arrays hold there: both are the same on any number of devices. `make_momentum_distribution`
    keeps masked users where they are; other momenta would let them drift without an effect.

    Args:
      watched: This device's rows of the watch matrix, uint8 (0 or 1) or bool
        `[num_users, num_movies]`.
      mask: Which users are real, bool `[num_users]`; all if None.
      prior_scale: Standard deviation of every parameter's prior.
      axis_name: The mapped axis over which users are sharded; None if they are all here.
      block_size: Users at a time; at most 600,000 entries at a time if None.

    Returns:
      `log_density(users, user_bias, movies, movie_bias)`: from float32 `[..., num_users, dim]`,
      `[..., num_users]`, `[..., num_movies, dim]` and `[..., num_movies]` to float32 `[...]`.
      Leading axes are chains; they run one after the other, as they do in `vmap` over the function,
      and share the one `psum`.

    Raises:
      ValueError, TypeError: A shape or dtype is not as above; so does the log density.
    """
    _check_watched(watched)
    num_users, num_movies = watched.shape
    _check_mask(mask, num_users)
    _check_prior_scale(prior_scale)
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be a positive number of users, given {block_size}")
    if mask is not None:
        watched = jnp.where(mask[:, None], watched, jnp.zeros_like(watched))
    block_size = _even_block_size(num_users, num_movies, block_size)
    precision = 1 / prior_scale**2
    # vmap would make of each product a batch of products, which XLA runs slowly on CPUs.
    sums = jax.custom_batching.sequential_vmap(
        lambda *arguments: _sums_by_blocks(*arguments, block_size)
    )

    def value_and_gradient(users, user_bias, movies, movie_bias):
        chains = _check_parameters(users, user_bias, movies, movie_bias, watched.shape)
        dim = users.shape[-1]
        # One array for users and one for movies, the bias behind the vector.
        rows = jnp.concatenate([users, user_bias[..., None]], -1).reshape(-1, num_users, dim + 1)
        columns = jnp.concatenate([movies, movie_bias[..., None]], -1)
        columns = columns.reshape(-1, num_movies, dim + 1).swapaxes(1, 2)
        if mask is not None:
            rows = jnp.where(mask[:, None], rows, 0)
        log_likelihood, by_rows, by_columns = lax.map(
            lambda chain: sums(watched, _logit_rows(chain[0], mask), chain[1]), (rows, columns)
        )
        num_parameters = _count(mask, num_users) * (dim + 1)
        local = log_likelihood + _log_prior(rows, num_parameters, prior_scale)
        total, by_columns = _psum_flat(local, by_columns, axis_name)
        value = total + _log_prior(columns, num_movies * (dim + 1), prior_scale)
        by_rows = by_rows - precision * rows
        by_columns = (by_columns - precision * columns).swapaxes(1, 2)
        gradient = (
            by_rows[..., :-1].reshape(users.shape),
            by_rows[..., -1].reshape(user_bias.shape),
            by_columns[..., :-1].reshape(movies.shape),
            by_columns[..., -1].reshape(movie_bias.shape),
        )
        return value.reshape(chains), gradient

    return with_gradient(value_and_gradient)


def _sums_by_blocks(watched, rows, columns, block_size):
    """Log likelihood and gradients of one chain.

    Args:
      watched: `[num_users, num_movies]`.
      rows: `[num_users, dim + 2]`, of a user the vector, 1 and the bias.
      columns: `[dim + 1, num_movies]`, of a movie the vector and the bias.
      block_size: Users at a time.

    Returns:
      Log likelihood `[]`, its gradient by each user's vector and bias `[num_users, dim + 1]`, and
      by each movie's `[dim + 1, num_movies]`.
    """
    num_users, num_movies = watched.shape
    ones = jnp.ones((1, num_movies), columns.dtype)
    by_logit = jnp.concatenate([columns, ones])
    by_user = jnp.concatenate([columns[:-1], ones]).T

    def add_block(total, start, size):
        block = lax.dynamic_slice_in_dim(rows, start, size)
        logits = block @ by_logit
        seen = lax.dynamic_slice_in_dim(watched, start, size) != 0
        log_likelihood, residual = _log_likelihood_and_residual(logits, seen)
        total = total[0] + log_likelihood, total[1] + block[:, :-1].T @ residual
        return total, residual @ by_user

    num_blocks = num_users // block_size
    total = jnp.zeros(num_movies, columns.dtype), jnp.zeros_like(columns)
    total, by_rows = lax.scan(
        lambda total, index: add_block(total, index * block_size, block_size),
        total,
        jnp.arange(num_blocks),
    )
    by_rows = by_rows.reshape(-1, rows.shape[1] - 1)
    rest = num_users % block_size
    if rest:
        total, by_rest = add_block(total, num_users - rest, rest)
        by_rows = jnp.concatenate([by_rows, by_rest])
    log_likelihood, by_columns = total
    return _sum_pairwise(log_likelihood), by_rows, by_columns


def _log_likelihood_and_residual(logits, seen):
    """Log likelihood `[num_movies]`, summed over users, and its gradient by the logits.

    Both are functions of the logit of what was not observed: -log(1 + exp(it)) and, but for the
    sign, its logistic. So neither loses digits in a tail.
    """
    against = jnp.where(seen, -logits, logits)
    small = jnp.exp(-jnp.abs(against))
    normalizer = 1 + small
    probability = jnp.where(against >= 0, 1, small) / normalizer
    residual = jnp.where(seen, probability, -probability)
    size = -(-logits.shape[0] // _TERMS_PER_LOGARITHM)
    products = _fold_rows(jnp.multiply, normalizer, size, 1)
    sums = _fold_rows(jnp.add, jnp.maximum(against, 0), size, 0)
    return -(jnp.log(products) + sums).sum(0), residual


def _fold_rows(function, x, size, neutral):
    """Combines rows `size` apart, in slices: XLA's CPU reductions would not be vectorized."""
    x = jnp.pad(x, [(0, -x.shape[0] % size), (0, 0)], constant_values=neutral)
    total = x[:size]
    for start in range(size, x.shape[0], size):
        total = function(total, x[start : start + size])
    return total


def _logit_rows(rows, mask):
    """Puts a 1 before the bias, to be multiplied with the movie's; masks users by their bias."""
    vectors, bias = rows[:, :-1], rows[:, -1:]
    ones = jnp.ones_like(bias)
    if mask is not None:
        ones = jnp.where(mask[:, None], ones, 0)
        bias = jnp.where(mask[:, None], bias, _LOGIT_OF_PADDING)
    return jnp.concatenate([vectors, ones, bias], 1)


def _log_prior(parameters, count, prior_scale):
    """Log density `[chains]` of normal parameters `[chains, ...]`, `count` of them real."""
    squares = (parameters * parameters).sum(1)
    normalizer = math.log(prior_scale) + 0.5 * math.log(2 * math.pi)
    return -0.5 / prior_scale**2 * squares.sum(1) - count * normalizer


def _count(mask, num_users):
    return num_users if mask is None else mask.sum()


def _psum_flat(value, by_columns, axis_name):
    """Sums over devices with one collective for all chains: its start is what costs."""
    if axis_name is None:
        return value, by_columns
    flat = jnp.concatenate([value[:, None], by_columns.reshape(len(value), -1)], 1)
    flat = lax.psum(flat, axis_name)
    return flat[:, 0], flat[:, 1:].reshape(by_columns.shape)


def _sum_pairwise(x):
    """Sums a vector in a tree: sums of millions one after the other would lose whole units."""
    while x.shape[0] > 1:
        half = -(-x.shape[0] // 2)
        x = x[:half] + jnp.pad(x[half:], (0, 2 * half - x.shape[0]))
    return x[0]


def _even_block_size(num_users, num_movies, block_size):
    """Users a block, without a small rest if the size is ours to choose."""
    if block_size is not None:
        return min(block_size, num_users)
    largest = max(_BLOCK_ENTRIES // num_movies, _MIN_BLOCK_ROWS)
    return -(-num_users // -(-num_users // largest))


def _normal_parts(num_users, num_movies, dim, scale, mask, axis_name):
    """Independent normal distributions of the four parts, the users' masked and sharded."""
    from tensorflow_probability.substrates import jax as tfp

    tfd = tfp.distributions

    def normal(*shape):
        return tfd.Normal(jnp.zeros(shape), jnp.float32(scale))

    return [
        _by_user(normal(num_users, dim), 2, mask, axis_name, "users"),
        _by_user(normal(num_users), 1, mask, axis_name, "user_bias"),
        tfd.Independent(normal(num_movies, dim), 2, name="movies"),
        tfd.Independent(normal(num_movies), 1, name="movie_bias"),
    ]


def _by_user(distribution, event_ndims, mask, axis_name, name):
    """Makes a part of which each user has a row: masked, independent and sharded."""
    from tensorflow_probability.substrates import jax as tfp

    if mask is not None:
        rows = jnp.reshape(mask, (-1,) + (1,) * (event_ndims - 1))
        # Masked would draw some other number than 0 for those who are not there.
        distribution = tfp.distributions.Masked(
            distribution, rows, safe_sample_fn=lambda d: jnp.zeros(d.batch_shape, d.dtype)
        )
    part = tfp.distributions.Independent(distribution, event_ndims, name=name)
    if axis_name is None:
        return part
    return tfp.experimental.distribute.Sharded(part, shard_axis_name=axis_name, name=name)


def _check_sizes(**sizes):
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be a positive number, given {size}")


def _check_prior_scale(prior_scale):
    if not prior_scale > 0:
        raise ValueError(f"prior_scale must be a positive number, given {prior_scale}")


def _check_watched(watched):
    if watched.ndim != 2 or not watched.size:
        raise ValueError(
            "watched must be [num_users, num_movies] and not empty, given shape "
            f"{tuple(watched.shape)}"
        )
    if watched.dtype not in (jnp.uint8, jnp.bool_):
        raise TypeError(
            f"watched must be uint8 or bool, given {watched.dtype}; say which entries were "
            "watched, as ratings > 0"
        )


def _check_mask(mask, num_users):
    if mask is not None and (mask.shape != (num_users,) or mask.dtype != bool):
        raise ValueError(f"mask must be bool [{num_users}], given {mask.dtype} {list(mask.shape)}")


def _check_parameters(users, user_bias, movies, movie_bias, shape):
    """Returns the shape of the chains."""
    num_users, num_movies = shape
    chains, dim = tuple(users.shape[:-2]), users.shape[-1] if users.ndim > 1 else 1
    expected = (
        (*chains, num_users, dim),
        (*chains, num_users),
        (*chains, num_movies, dim),
        (*chains, num_movies),
    )
    given = tuple(tuple(part.shape) for part in (users, user_bias, movies, movie_bias))
    if given != expected:
        raise ValueError(
            f"users, user_bias, movies and movie_bias must be [..., {num_users}, dim], "
            f"[..., {num_users}], [..., {num_movies}, dim] and [..., {num_movies}] with the same "
            f"leading axes, given shapes {', '.join(map(str, given))}"
        )
    return chains
