"""Recommendations from draws of a matrix factorization, and how good they are.

A draw of the posterior ranks a user's unseen movies by their logits; the draws together say how
sure a recommendation is. All draws of a user go through one program, all users through one program
a block of draws, so that nothing of the size draws x users x movies is ever in memory.

Sources: recall and NDCG at k with binary relevance, Järvelin and Kekäläinen, "Cumulated gain-based
evaluation of IR techniques", ACM TOIS 20(4), 2002. Bias of an entropy of counts: Miller, "Note on
the bias of information estimates", 1955. Error of it: the delete-a-block jackknife of Künsch, "The
jackknife and the bootstrap for general stationary observations", Annals of Statistics 17(3), 1989.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

Array = jax.Array

_BLOCK_BYTES = 256 << 20  # Of logits a call: how often the progress bar moves.


class Draws(NamedTuple):
    """Draws of a matrix factorization, float32 on the host.

    Attributes:
      users: `[num_draws, num_chains, num_users, dim]`.
      user_bias: `[num_draws, num_chains, num_users]`.
      movies: `[num_draws, num_chains, num_movies, dim]`.
      movie_bias: `[num_draws, num_chains, num_movies]`.
    """

    users: np.ndarray
    user_bias: np.ndarray
    movies: np.ndarray
    movie_bias: np.ndarray

    @property
    def num_draws(self) -> int:
        """Draws of all chains together."""
        return self.users.shape[0] * self.users.shape[1]


@dataclasses.dataclass(frozen=True)
class Recommendations:
    """What the draws recommend to one user.

    Attributes:
      counts: In how many draws a movie is among the k best unseen ones, int64 `[num_movies]`.
      first: The best unseen movie of each draw, int32 `[num_draws, num_chains]`.
      probabilities: Posterior mean probability to watch each movie, float32 `[num_movies]`; of seen
        ones too.
      num_draws: Draws of all chains together.
      k: How many movies a draw recommends.
    """

    counts: np.ndarray
    first: np.ndarray
    probabilities: np.ndarray
    num_draws: int
    k: int

    def best(self, count: int) -> np.ndarray:
        """Returns the movies that most draws recommend, int64 `[count]`, lower numbers first."""
        return np.argsort(-self.counts, kind="stable")[:count]


def recommend(draws: Draws, user: int, seen: np.ndarray, k: int = 10) -> Recommendations:
    """Ranks a user's unseen movies in every draw, in one program.

    Args:
      draws: Of the posterior. Current JAX copies host arrays at each call; for many users, `Draws(*
        jax.device_put(tuple(draws)))` does it once.
      user: The user's number.
      seen: What not to recommend, bool or 0 and 1, `[num_movies]`.
      k: How many movies each draw recommends. Of equal logits the lower number goes first.

    Returns:
      The recommendations.

    Raises:
      ValueError: Shapes do not fit, there is no such user, or fewer than k unseen movies.
    """
    num_users, num_movies = _check_draws(draws)
    if not 0 <= user < num_users:
        raise ValueError(f"user must be from 0 to {num_users - 1}, given {user}")
    seen = _check_seen(seen, (num_movies,), k)
    counts, best, probabilities = _rank_user(
        draws.users[:, :, user],
        draws.user_bias[:, :, user],
        draws.movies,
        draws.movie_bias,
        seen,
        k,
    )
    return Recommendations(
        np.asarray(counts, np.int64),
        np.asarray(best)[:, 0].reshape(draws.users.shape[:2]),
        np.asarray(probabilities),
        draws.num_draws,
        k,
    )


def first_by_draw(draws: Draws, seen: np.ndarray, *, progress: bool = True) -> np.ndarray:
    """Finds the best unseen movie of every user in every draw.

    Args:
      draws: Of the posterior.
      seen: What not to recommend, bool or 0 and 1, `[num_users, num_movies]`.
      progress: Show a progress bar.

    Returns:
      int32 `[num_draws, num_chains, num_users]`.

    Raises:
      ValueError: Shapes do not fit, or a user has seen everything.
    """
    num_users, num_movies = _check_draws(draws)
    seen = jnp.asarray(_check_seen(seen, (num_users, num_movies), 1))
    first = np.empty(draws.user_bias.shape, np.int32)
    for index, block in _blocks(draws, progress):
        first[index] = _first_of_block(*block, seen)
    return first


def predict(draws: Draws, *, progress: bool = True) -> np.ndarray:
    """Computes the posterior mean probability that a user watches a movie, for all pairs.

    Args:
      draws: Of the posterior.
      progress: Show a progress bar.

    Returns:
      float32 `[num_users, num_movies]`.

    Raises:
      ValueError: Shapes do not fit.
    """
    total = jnp.zeros(_check_draws(draws), jnp.float32)
    for _, block in _blocks(draws, progress):
        total = _add_probabilities(total, *block)
    return np.asarray(total) / np.float32(draws.num_draws)


def genre_counts(counts: np.ndarray, genres: np.ndarray) -> np.ndarray:
    """Counts genres among recommendations; a movie counts fully for each of its genres.

    So the counts of genres may sum to more than those of movies, and movies without a genre count
    nowhere.

    Args:
      counts: Recommendations of each movie, `[num_movies]`.
      genres: Which genres each movie has, bool `[num_movies, num_genres]`.

    Returns:
      int64 `[num_genres]`.

    Raises:
      ValueError: Shapes do not fit.
    """
    counts, genres = np.asarray(counts), np.asarray(genres)
    if genres.ndim != 2 or counts.shape != genres.shape[:1]:
        raise ValueError(
            f"counts {counts.shape} and genres {genres.shape} must be [num_movies] and "
            "[num_movies, num_genres]"
        )
    return counts @ genres.astype(np.int64)


def entropy(first: np.ndarray, *, num_blocks: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the entropy of the recommended movie over draws, with its Monte Carlo error.

    0 where all draws recommend the same movie. The estimate from counts is biased down by about
    (different movies - 1) / (2 * draws), which is added. Draws of a chain are correlated: the error
    comes from leaving out blocks of consecutive draws, one after the other, so blocks should be
    long against the autocorrelation.

    Args:
      first: The movie of each draw, int `[num_draws, num_chains, ...]`.
      num_blocks: Blocks a chain.

    Returns:
      Entropy in nats and its standard error, each float64 `[...]`.

    Raises:
      ValueError: There are fewer than `num_blocks` draws a chain, or fewer than 2 blocks.
    """
    first = np.asarray(first)
    if first.ndim < 2 or not 2 <= num_blocks <= len(first):
        raise ValueError(
            "first must be [num_draws, num_chains, ...] with at least num_blocks draws, given "
            f"shape {first.shape} and num_blocks={num_blocks}"
        )
    length = len(first) // num_blocks
    kept = first[len(first) - num_blocks * length :]
    blocks = kept.reshape(num_blocks, length, first.shape[1], -1).swapaxes(1, 2)
    blocks = blocks.reshape(num_blocks * first.shape[1], length, -1)
    flat = first.reshape(first.shape[0] * first.shape[1], -1)
    values, errors = zip(*(_entropy(flat[:, i], blocks[:, :, i]) for i in range(flat.shape[1])))
    shape = first.shape[2:]
    return np.reshape(values, shape), np.reshape(errors, shape)


def popularity(watched: np.ndarray) -> np.ndarray:
    """Computes each movie's share of users, the same recommendation for everybody.

    Args:
      watched: Who watched what, 0 and 1, `[num_users, num_movies]`.

    Returns:
      float64 `[num_movies]` above 0 and below 1: half a user is added to either side.
    """
    watched = np.asarray(watched)
    return (watched.sum(0) + 0.5) / (len(watched) + 1)


def recall_at_k(scores: np.ndarray, train: np.ndarray, held_out: np.ndarray, k: int) -> np.ndarray:
    """Computes which share of a user's held-out views is among the k best unseen movies.

    Of a user with more than k held-out views, k is what the share is of: 1 can be reached.

    Args:
      scores: What movies are ranked by, `[num_users, num_movies]`, or `[num_movies]` for all.
      train: Views that were trained on, 0 and 1, `[num_users, num_movies]`; not recommended.
      held_out: Views that were not, the same.
      k: How many movies to recommend.

    Returns:
      float64 `[num_users]`, NaN for users without held-out views.

    Raises:
      ValueError: Shapes do not fit, or a user has fewer than k unseen movies.
    """
    hits, wanted = _hits(scores, train, held_out, k)
    return hits.sum(1) / np.where(wanted, np.minimum(wanted, k), np.nan)


def ndcg_at_k(scores: np.ndarray, train: np.ndarray, held_out: np.ndarray, k: int) -> np.ndarray:
    """Computes the normalized discounted cumulative gain: hits count more near the top.

    A hit at rank r counts 1 / log2(r + 1); the sum is divided by the largest there can be.

    Args:
      scores: As in `recall_at_k`, and so are the others.
      train: Views that were trained on.
      held_out: Views that were not.
      k: How many movies to recommend.

    Returns:
      float64 `[num_users]` from 0 to 1, NaN for users without held-out views.

    Raises:
      ValueError: As `recall_at_k`.
    """
    hits, wanted = _hits(scores, train, held_out, k)
    discounts = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.concatenate([[np.nan], np.cumsum(discounts)])[np.minimum(wanted, k)]
    return hits @ discounts / ideal


def log_score(probabilities: np.ndarray, train: np.ndarray, held_out: np.ndarray) -> float:
    """Computes the mean log probability of what users did with unseen movies: watch them or not.

    Args:
      probabilities: To watch, `[num_users, num_movies]`, or `[num_movies]` for all users.
      train: Views that were trained on, 0 and 1, `[num_users, num_movies]`; left out.
      held_out: Views that were not, the same.

    Returns:
      Nats a pair of user and movie, at most 0.

    Raises:
      ValueError: Shapes do not fit, or a probability is not between 0 and 1.
    """
    probabilities, train, held_out = _check_scores(probabilities, train, held_out)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError("probabilities must lie between 0 and 1; given are logits or scores?")
    tiny = np.finfo(np.float32).tiny
    likelihood = np.where(held_out, probabilities, 1 - probabilities)[~train]
    return float(np.log(np.maximum(likelihood, tiny)).mean())


def evaluate(
    probabilities: np.ndarray, train: np.ndarray, held_out: np.ndarray, k: int = 10
) -> dict[str, float]:
    """Sums up how good probabilities are on held-out views.

    Args:
      probabilities: To watch, `[num_users, num_movies]`, or `[num_movies]` for all users.
      train: Views that were trained on, 0 and 1, `[num_users, num_movies]`.
      held_out: Views that were not, the same.
      k: How many movies to recommend.

    Returns:
      By name: mean recall and NDCG at k over users with held-out views, the log score, and how many
      users those are.

    Raises:
      ValueError: As `recall_at_k` and `log_score`.
    """
    recall = recall_at_k(probabilities, train, held_out, k)
    return {
        f"recall@{k}": float(np.nanmean(recall)),
        f"NDCG@{k}": float(np.nanmean(ndcg_at_k(probabilities, train, held_out, k))),
        "log score": log_score(probabilities, train, held_out),
        "users": int((~np.isnan(recall)).sum()),
    }


@functools.partial(jax.jit, static_argnames="k")
def _rank_user(users, user_bias, movies, movie_bias, seen, k):
    # A product and a sum, fused: XLA runs a batch of matrix products slowly on CPUs.
    logits = (users[..., None, :] * movies).sum(-1) + user_bias[..., None] + movie_bias
    flat = logits.reshape(-1, len(seen))
    # top_k puts the lower index first among equals. XLA sorts all movies instead if its result is
    # sliced in the same program, or has more than two axes.
    _, best = lax.top_k(jnp.where(seen, -jnp.inf, flat), k)
    counts = jnp.zeros(seen.shape, jnp.int32).at[best].add(1)
    return counts, best, jax.nn.sigmoid(flat).mean(0)


def _logits(users, user_bias, movies, movie_bias):
    logits = jnp.dot(users, movies.T, precision="float32")
    return logits + user_bias[:, None] + movie_bias


def _first(scores):
    # Two reductions that XLA vectorizes on CPUs, as it does not with argmax.
    best = scores == scores.max(-1, keepdims=True)
    numbers = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.where(best, numbers, scores.shape[-1]).min(-1)


# Draw after draw: XLA runs a batch of matrix products slowly on CPUs.
@jax.jit
def _first_of_block(users, user_bias, movies, movie_bias, seen):
    return lax.map(
        lambda draw: _first(jnp.where(seen, -jnp.inf, _logits(*draw))),
        (users, user_bias, movies, movie_bias),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _add_probabilities(total, *block):
    def add(total, draw):
        return total + jax.nn.sigmoid(_logits(*draw)), None

    return lax.scan(add, total, block)[0]


def _blocks(draws: Draws, progress: bool):
    """Yields indices into draws and chains, and the parts of these draws, a block at a time."""
    num_draws, num_chains = draws.user_bias.shape[:2]
    pair_bytes = 4 * draws.users.shape[2] * draws.movies.shape[2]
    size = max(1, min(_BLOCK_BYTES // pair_bytes, num_draws))
    with tqdm(total=num_draws * num_chains, unit="draw", disable=not progress) as bar:
        for chain in range(num_chains):
            for start in range(0, num_draws, size):
                index = slice(start, start + size), chain
                yield index, tuple(part[index] for part in draws)
                bar.update(len(draws.users[index]))


def _entropy(values: np.ndarray, blocks: np.ndarray) -> tuple[float, float]:
    """Entropy of values `[num]`, and its jackknife error by leaving out each row of blocks."""
    _, inverse = np.unique(values, return_inverse=True)
    total = np.bincount(inverse.reshape(-1))
    names = np.unique(values)
    estimates = []
    for block in blocks:
        left_out = np.bincount(np.searchsorted(names, block), minlength=len(total))
        estimates.append(_corrected_entropy(total - left_out))
    count = len(estimates)
    variance = (count - 1) / count * np.sum((estimates - np.mean(estimates)) ** 2)
    return _corrected_entropy(total), float(np.sqrt(variance))


def _corrected_entropy(counts: np.ndarray) -> float:
    counts = counts[counts > 0]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))


def _hits(scores, train, held_out, k) -> tuple[np.ndarray, np.ndarray]:
    """Whether the k best unseen movies were watched, `[num_users, k]`, and how many views count."""
    scores, train, held_out = _check_scores(scores, train, held_out)
    _check_k(k, train)
    best = np.argsort(np.where(train, np.inf, -scores), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(held_out, best, 1), held_out.sum(1)


def _check_draws(draws: Draws) -> tuple[int, int]:
    """Returns the numbers of users and movies."""
    shapes = [np.shape(part) for part in draws]
    users, user_bias, movies, movie_bias = shapes
    fits = len(users) == len(movies) == 4 and users[:3] == user_bias and movies[:3] == movie_bias
    if not fits or users[:2] != movies[:2] or users[3] != movies[3]:
        raise ValueError(
            "draws must be users [num_draws, num_chains, num_users, dim], user_bias [num_draws, "
            "num_chains, num_users], and movies and movie_bias alike, given shapes "
            f"{', '.join(map(str, shapes))}"
        )
    return users[2], movies[2]


def _check_seen(seen: Any, shape: tuple[int, ...], k: int) -> np.ndarray:
    seen = np.asarray(seen)
    if seen.shape != shape:
        raise ValueError(f"seen must have shape {shape}, given {seen.shape}")
    seen = seen.astype(bool)
    _check_k(k, seen)
    return seen


def _check_k(k: int, seen: np.ndarray) -> None:
    fewest = int((~seen).sum(-1).min())
    if not 1 <= k <= fewest:
        raise ValueError(f"k must be from 1 to {fewest}, the fewest unseen movies, given {k}")


def _check_scores(scores, train, held_out) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    train, held_out, scores = np.asarray(train), np.asarray(held_out), np.asarray(scores)
    if train.ndim != 2 or train.shape != held_out.shape:
        raise ValueError(
            f"train {train.shape} and held_out {held_out.shape} must both be [num_users, "
            "num_movies]"
        )
    if scores.shape not in (train.shape, train.shape[1:]):
        raise ValueError(f"scores must be {train.shape} or {train.shape[1:]}, given {scores.shape}")
    train, held_out = train.astype(bool), held_out.astype(bool)
    if (train & held_out).any():
        raise ValueError("held_out has views that are in train; use data.split_views")
    return np.broadcast_to(scores, train.shape), train, held_out
