"""Dealing examples out to clients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import data

LABELS = np.random.default_rng(0).integers(0, 10, 1000)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_clients=st.integers(1, 60),
    concentration=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_example_is_dealt_out_twice_and_every_client_has_its_share(
    num_clients, concentration, seed
):
    partition = data.partition_clients(LABELS, num_clients, concentration=concentration, seed=seed)
    dealt = np.concatenate(partition)
    assert [len(indices) for indices in partition] == [1000 // num_clients] * num_clients
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < 1000


def test_the_same_seed_deals_the_same_examples():
    one, two, other = (data.partition_clients(LABELS, 10, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_small_concentration_makes_clients_unlike():
    def largest_share(concentration):
        partition = data.partition_clients(LABELS, 20, concentration=concentration, seed=0)
        shares = [np.bincount(LABELS[p], minlength=10).max() / len(p) for p in partition]
        return np.mean(shares)

    assert largest_share(0.05) > 0.5
    assert largest_share(1000.0) < 0.3


@pytest.mark.parametrize(("arguments", "message"), [
    ({"num_clients": 0}, "num_clients"), ({"num_clients": 1001}, "cannot deal"),
    ({"num_clients": 10, "examples_per_client": 101}, "cannot deal 101"),
    ({"num_clients": 10, "concentration": 0.0}, "concentration"),
    ({"num_clients": 10, "concentration": float("nan")}, "concentration"),
])  # fmt: skip
def test_what_cannot_be_dealt_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.partition_clients(LABELS, **arguments)


def test_batches_hold_the_clients_examples_in_order():
    images = np.arange(24, dtype=np.float32).reshape(12, 1, 2)
    labels = np.arange(12)
    clients = data.batch_clients(images, labels, [np.array([5, 3, 1, 0, 2]), np.array([7, 8])], 2)
    assert [len(client) for client in clients] == [2, 1]
    first = clients[0][0]
    assert list(first) == ["pixels", "labels"]
    np.testing.assert_array_equal(first["pixels"], [[10, 11], [6, 7]])
    np.testing.assert_array_equal(first["labels"], [5, 3])
    assert (first["pixels"].dtype, first["labels"].dtype) == (np.float32, np.int32)


def test_a_partition_without_clients_is_refused():
    with pytest.raises(ValueError, match="partition must hold at least one client"):
        data.batch_clients(np.zeros((4, 2)), np.arange(4), [], 2)


@pytest.mark.parametrize(("labels", "batch_size", "message"), [
    (np.arange(3), 2, "4 images and 3 labels"), (np.arange(4), 0, "batch_size"),
    (np.arange(4), 3, "too few for one batch of 3"),
])  # fmt: skip
def test_what_cannot_be_batched_is_refused(labels, batch_size, message):
    with pytest.raises(ValueError, match=message):
        data.batch_clients(np.zeros((4, 2)), labels, [np.array([0, 1])], batch_size)


def test_a_cohort_depends_on_seed_and_round_only():
    cohorts = [data.sample_cohort(20, 5, r, seed=1).tolist() for r in (0, 1, 0)]
    assert cohorts[0] == cohorts[2] != cohorts[1]
    assert all(len(set(cohort)) == 5 and max(cohort) < 20 for cohort in cohorts)


@pytest.mark.parametrize("cohort_size", [0, 21])
def test_a_cohort_that_cannot_be_drawn_is_refused(cohort_size):
    with pytest.raises(ValueError, match="cohort_size must be from 1 to num_clients = 20"):
        data.sample_cohort(20, cohort_size, 0)
