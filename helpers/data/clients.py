"""Deals examples out to federated clients, and draws the cohort of a round."""

import collections

import numpy as np


def partition_clients(
    labels: np.ndarray,
    num_clients: int,
    *,
    concentration: float = 0.5,
    examples_per_client: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Deals examples out to clients with skewed label shares.

    Each client's label shares are drawn from a symmetric Dirichlet distribution, and its examples
    by those shares, without replacement; a label that has run out is left out of the shares.
    Method: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", 2019, arXiv:1909.06335.

    Args:
      labels: Integers `[num_examples]`.
      num_clients: Number of clients.
      concentration: Parameter of the Dirichlet distribution: towards 0, clients with one label
        each; towards infinity, clients that are alike.
      examples_per_client: Number of examples of each client; by default as many as there are for
        all alike.
      seed: Seed of the draw.

    Returns:
      For each client, the indices of its examples, int64 `[examples_per_client]`; no example is
      dealt out twice.

    Raises:
      ValueError: There are too few examples, or an argument is not positive.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must have one dimension, given shape {list(labels.shape)}")
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, given {num_clients}")
    if not (concentration > 0 and np.isfinite(concentration)):
        raise ValueError(f"concentration must be positive and finite, given {concentration}")
    if examples_per_client is None:
        examples_per_client = len(labels) // num_clients
    if examples_per_client < 1 or examples_per_client * num_clients > len(labels):
        raise ValueError(
            f"cannot deal {examples_per_client} examples to each of {num_clients} clients from "
            f"{len(labels)}; use fewer clients or fewer examples each"
        )
    generator = np.random.default_rng(seed)
    classes = np.unique(labels)
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in classes]
    used = np.zeros(len(classes), int)
    sizes = np.array([len(pool) for pool in pools])
    partition = []
    for _ in range(num_clients):
        shares = generator.dirichlet(np.full(len(classes), concentration))
        indices = np.empty(examples_per_client, np.int64)
        for position in range(examples_per_client):
            left = np.where(used < sizes, shares, 0)
            if left.sum() <= 0:  # Only labels that this client has no share of are left.
                left = (sizes - used).astype(float)
            label = generator.choice(len(classes), p=left / left.sum())
            indices[position] = pools[label][used[label]]
            used[label] += 1
        partition.append(indices)
    return partition


def batch_clients(
    images: np.ndarray, labels: np.ndarray, partition: list[np.ndarray], batch_size: int
) -> list[list[collections.OrderedDict]]:
    """Cuts each client's examples into batches of one size.

    XLA programs have fixed shapes, so the examples that do not fill a last batch are left out.

    Args:
      images: float32 `[num_examples, ...]`.
      labels: Integers `[num_examples]`.
      partition: Indices of each client's examples.
      batch_size: Number of examples in a batch.

    Returns:
      For each client a list of batches: ordered dicts of `pixels` float32 `[batch_size, dim]` and
      `labels` int32 `[batch_size]`.

    Raises:
      ValueError: `batch_size` is not positive, there is no client, a client cannot fill one batch,
        or images and labels differ in number.
    """
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: pass one label an image")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, given {batch_size}")
    if not len(partition):
        raise ValueError("partition must hold at least one client, given none")
    smallest = min(len(indices) for indices in partition)
    if smallest < batch_size:
        raise ValueError(
            f"a client has {smallest} examples, too few for one batch of {batch_size}; use a "
            "smaller batch_size or fewer clients"
        )
    pixels = np.asarray(images, np.float32).reshape(len(images), -1)
    labels = np.asarray(labels, np.int32)
    return [
        [
            collections.OrderedDict(pixels=pixels[batch], labels=labels[batch])
            for batch in indices[: len(indices) // batch_size * batch_size].reshape(-1, batch_size)
        ]
        for indices in partition
    ]


def sample_cohort(
    num_clients: int, cohort_size: int, round_index: int, seed: int = 0
) -> np.ndarray:
    """Draws the clients of a round, without replacement.

    The draw depends on the seed and the round only, so a run that is resumed at a round goes on
    with the clients that it would have had.

    Args:
      num_clients: Number of clients to draw from.
      cohort_size: Number of clients in the cohort.
      round_index: Index of the round, at least 0.
      seed: Seed of the run.

    Returns:
      Different client indices, int64 `[cohort_size]`.

    Raises:
      ValueError: The cohort is empty or larger than the population.
    """
    if not 1 <= cohort_size <= num_clients:
        raise ValueError(
            f"cohort_size must be from 1 to num_clients = {num_clients}, given {cohort_size}"
        )
    return np.random.default_rng([seed, round_index]).choice(
        num_clients, cohort_size, replace=False
    )
