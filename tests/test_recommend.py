"""Recommendations against plain loops over draws and users in float64, and hand-made metrics."""

import numpy as np
import pytest

from helpers import recommend
from helpers.recommend import Draws

DRAWS, CHAINS, USERS, MOVIES, DIM = 13, 2, 5, 9, 3


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(0)
    shapes = (USERS, DIM), (USERS,), (MOVIES, DIM), (MOVIES,)
    return Draws(*(rng.normal(size=(DRAWS, CHAINS, *s)).astype(np.float32) for s in shapes))


@pytest.fixture(scope="module")
def seen():
    return np.random.default_rng(1).random((USERS, MOVIES)) < 0.3


def logits(draws, draw, chain, user):
    users, user_bias, movies, movie_bias = (part[draw, chain].astype(float) for part in draws)
    return movies @ users[user] + user_bias[user] + movie_bias


def rank_by_loop(draws, user, seen, k):
    """Counts, first movies and mean probabilities, one draw after the other."""
    counts, first = np.zeros(MOVIES, int), np.zeros((DRAWS, CHAINS), int)
    total = np.zeros(MOVIES)
    for draw in range(DRAWS):
        for chain in range(CHAINS):
            values = logits(draws, draw, chain, user)
            total += 1 / (1 + np.exp(-values))
            unseen = sorted(
                (movie for movie in range(MOVIES) if not seen[movie]), key=lambda m: -values[m]
            )
            counts[unseen[:k]] += 1
            first[draw, chain] = unseen[0]
    return counts, first, total / (DRAWS * CHAINS)


# --- rankings


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("user", range(USERS))
def test_recommendations_equal_a_loop_over_draws(draws, seen, user, k):
    found = recommend.recommend(draws, user, seen[user], k)
    counts, first, probabilities = rank_by_loop(draws, user, seen[user], k)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_array_equal(found.first, first)
    np.testing.assert_allclose(found.probabilities, probabilities, rtol=1e-5)
    assert found.counts.sum() == found.num_draws * k == DRAWS * CHAINS * k


@pytest.mark.parametrize("draws_a_block", [1, 4, 100])
def test_first_movies_and_probabilities_of_all_users_equal_the_loop(
    draws, seen, monkeypatch, draws_a_block
):
    monkeypatch.setattr(recommend, "_BLOCK_BYTES", draws_a_block * 4 * USERS * MOVIES)
    first = recommend.first_by_draw(draws, seen, progress=False)
    probabilities = recommend.predict(draws, progress=False)
    for user in range(USERS):
        _, wanted, mean = rank_by_loop(draws, user, seen[user], 1)
        np.testing.assert_array_equal(first[:, :, user], wanted)
        np.testing.assert_allclose(probabilities[user], mean, rtol=1e-5)


def test_of_equal_movies_the_lower_number_goes_first():
    equal = Draws(*(np.zeros((1, 1, *shape), np.float32) for shape in [(1, 2), (1,), (4, 2), (4,)]))
    found = recommend.recommend(equal, 0, np.array([1, 0, 0, 0]), 2)
    assert found.counts.tolist() == [0, 1, 1, 0]
    assert found.best(3).tolist() == [1, 2, 0]
    assert recommend.first_by_draw(equal, np.array([[1, 0, 0, 0]]), progress=False).item() == 1


def test_a_movie_counts_for_each_of_its_genres():
    genres = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
    assert recommend.genre_counts(np.array([5, 2, 7]), genres).tolist() == [5, 7, 0]


# --- entropy


def test_entropy_of_one_movie_is_zero():
    value, error = recommend.entropy(np.full((40, 2), 7))
    assert value == 0
    assert error == 0


def test_entropy_equals_that_of_the_shares_plus_the_correction():
    first = np.array([3, 3, 9, 3] * 10)[:, None]
    value, _ = recommend.entropy(first)
    wanted = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) + 1 / (2 * 40)
    assert value == pytest.approx(wanted)


def sticky_chains(rng, repeats, num_draws=600, num_runs=1):
    """Draws of which each stays for `repeats`: `[num_draws, 2, num_runs]`."""
    fresh = rng.choice(4, (num_draws // repeats, 2, num_runs), p=[0.4, 0.3, 0.2, 0.1])
    return np.repeat(fresh, repeats, axis=0)


@pytest.mark.parametrize("repeats", [1, 6])
def test_error_of_the_entropy_is_its_spread_over_simulations(repeats):
    values, errors = recommend.entropy(
        sticky_chains(np.random.default_rng(0), repeats, num_runs=300)
    )
    assert values.shape == errors.shape == (300,)
    assert np.mean(errors) == pytest.approx(values.std(), rel=0.15)


def test_entropy_of_independent_draws_is_hardly_biased():
    values, _ = recommend.entropy(
        sticky_chains(np.random.default_rng(1), 1, num_draws=40, num_runs=2000)
    )
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    truth = -(shares * np.log(shares)).sum()
    # Without the correction it would be 3 / (2 * 80) = 0.019 lower.
    assert values.mean() == pytest.approx(truth, abs=0.004)


# --- metrics, by hand

SCORES = np.array([[0.9, 0.8, 0.7, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.5, 0.5, 0.5, 0.5]])
TRAIN = np.array([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
HELD_OUT = np.array([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_recall_equals_hand_counts():
    # Recommended at 2: movies 1 and 2 to user 0 (1 of 2), 4 and 3 to user 1 (0 of 1).
    found = recommend.recall_at_k(SCORES, TRAIN, HELD_OUT, 2)
    np.testing.assert_allclose(found, [0.5, 0.0, np.nan])
    # At 1 user 0 can have one hit, and has it.
    np.testing.assert_allclose(recommend.recall_at_k(SCORES, TRAIN, HELD_OUT, 1), [1, 0, np.nan])
    np.testing.assert_allclose(recommend.recall_at_k(SCORES, TRAIN, HELD_OUT, 4), [1, 1, np.nan])


def test_ndcg_equals_hand_counts():
    # User 0 at 3: movies 1, 2, 3, hits at ranks 1 and 3. User 1 at 4: hit at rank 4.
    found = recommend.ndcg_at_k(SCORES, TRAIN, HELD_OUT, 4)
    best = 1 + 1 / np.log2(3)
    np.testing.assert_allclose(found, [(1 + 1 / np.log2(4)) / best, 1 / np.log2(5), np.nan])


def test_scores_for_all_users_alike_are_taken():
    found = recommend.recall_at_k(SCORES[0], TRAIN, HELD_OUT, 2)
    np.testing.assert_allclose(found, [0.5, 1.0, np.nan])


def test_log_score_equals_hand_counts():
    probabilities = np.array([[0.5, 0.25], [0.1, 0.8]])
    train, held_out = np.array([[1, 0], [0, 0]]), np.array([[0, 1], [0, 0]])
    wanted = (np.log(0.25) + np.log(0.9) + np.log(0.2)) / 3
    assert recommend.log_score(probabilities, train, held_out) == pytest.approx(wanted)


def test_evaluation_averages_over_users_with_held_out_views():
    found = recommend.evaluate(SCORES, TRAIN, HELD_OUT, 2)
    assert found["recall@2"] == pytest.approx(0.25)
    assert found["users"] == 2
    assert list(found) == ["recall@2", "NDCG@2", "log score", "users"]


def test_popularity_is_the_share_of_users_with_half_a_user_on_either_side():
    np.testing.assert_allclose(recommend.popularity(TRAIN), [1.5 / 4, 0.125, 1.5 / 4, 0.125, 0.125])


# --- bad input


@pytest.mark.parametrize("user", [-1, USERS])
def test_unknown_user_is_refused(draws, seen, user):
    with pytest.raises(ValueError, match=f"user must be from 0 to 4, given {user}"):
        recommend.recommend(draws, user, seen[0])


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_unseen_movies_is_refused(draws, k):
    with pytest.raises(ValueError, match="k must be from 1 to 4, the fewest unseen movies"):
        recommend.recommend(draws, 0, np.arange(MOVIES) < 5, k)


def test_a_user_who_has_seen_everything_is_refused(draws, seen):
    with pytest.raises(ValueError, match="k must be from 1 to 0"):
        recommend.first_by_draw(draws, seen | (np.arange(USERS) == 2)[:, None])


@pytest.mark.parametrize("part", range(4))
def test_draws_that_do_not_fit_are_refused(draws, part):
    parts = list(draws)
    parts[part] = parts[part][:, :, 1:]
    with pytest.raises(ValueError, match="draws must be users"):
        recommend.predict(Draws(*parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": TRAIN[:2]}, "must both be"),
        ({"scores": SCORES[:, :3]}, "scores must be"),
        ({"held_out": TRAIN}, "held_out has views that are in train"),
        ({"k": 5}, "k must be from 1 to 4"),
    ],
)
def test_views_and_scores_that_do_not_fit_are_refused(change, message):
    arguments = {"scores": SCORES, "train": TRAIN, "held_out": HELD_OUT, "k": 2} | change
    with pytest.raises(ValueError, match=message):
        recommend.recall_at_k(**arguments)


def test_logits_are_not_taken_for_probabilities():
    with pytest.raises(ValueError, match="between 0 and 1"):
        recommend.log_score(SCORES * 3, TRAIN, HELD_OUT)


@pytest.mark.parametrize("first", [np.zeros(40), np.zeros((10, 2))])
def test_too_few_draws_for_an_entropy_are_refused(first):
    with pytest.raises(ValueError, match=r"first must be \[num_draws, num_chains"):
        recommend.entropy(first)


def test_genres_of_other_movies_are_refused():
    with pytest.raises(ValueError, match="must be"):
        recommend.genre_counts(np.zeros(3, int), np.zeros((4, 2), bool))
