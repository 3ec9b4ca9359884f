"""The matrix factorization against float64 NumPy and TFP, on 1 to 8 devices in a child process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorflow_probability.substrates import jax as tfp

from helpers import sampling, sharding
from helpers.models import check_sharded_model
from helpers.models.matrix_factorization import (
    make_initial_state,
    make_joint_distribution,
    make_log_density,
    make_momentum_distribution,
)

COUNTS = (1, 2, 3, 5, 8)
USERS, MOVIES, DIM = 43, 11, 3
PARTS = (0, 1, 2, 3)
# One block, blocks with and without a rest, more rows a block than terms a logarithm, or fewer.
BLOCK_SIZES = (None, 1, 5, 20, 43, 100)
HMC_USERS, HMC_MOVIES, HMC_DIM, HMC_DEVICES, HMC_DRAWS = 20, 6, 2, 3, 10


def make_case(chains=(), seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    watched = (rng.random((USERS, MOVIES)) < 0.3).astype(np.uint8)
    shapes = (USERS, DIM), (USERS,), (MOVIES, DIM), (MOVIES,)
    parts = [scale * rng.normal(size=(*chains, *shape)) for shape in shapes]
    return watched, *(part.astype(np.float32) for part in parts)


def reference(watched, *parts, prior_scale=1.0):
    """Value and gradients of one chain in float64."""
    users, user_bias, movies, movie_bias = (part.astype(float) for part in parts)
    logits = users @ movies.T + user_bias[:, None] + movie_bias
    value = (watched * logits - np.logaddexp(0, logits)).sum()
    for part in parts:
        z = part.astype(float) / prior_scale
        value += (-0.5 * z**2 - np.log(prior_scale) - 0.5 * np.log(2 * np.pi)).sum()
    # The logistic function, without overflow.
    residual = watched - np.exp(-np.logaddexp(0, -logits))
    gradients = residual @ movies, residual.sum(1), residual.T @ users, residual.sum(0)
    return value, [g - p / prior_scale**2 for g, p in zip(gradients, parts)]


def close(found, expected):
    value, gradients = found
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    for part, wanted in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=1e-5)


def differentiate(watched, *parts, **options):
    density = make_log_density(jnp.asarray(watched), **options)
    return jax.jit(jax.value_and_grad(density, PARTS))(*parts)


# --- log density and gradient


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_density_and_gradient_equal_float64(block_size):
    close(differentiate(*make_case(), block_size=block_size), reference(*make_case()))


def test_bool_watch_matrix_equals_uint8():
    watched, *parts = make_case()
    close(differentiate(watched.astype(bool), *parts), reference(watched, *parts))


@pytest.mark.parametrize("prior_scale", [0.5, 3.0])
def test_prior_scale_equals_float64(prior_scale):
    found = differentiate(*make_case(), prior_scale=prior_scale)
    close(found, reference(*make_case(), prior_scale=prior_scale))


def test_tails_of_the_logistic_equal_float64():
    case = make_case(scale=15.0)  # logits up to some hundred
    logits = case[1] @ case[3].T
    assert np.abs(logits).max() > 300
    close(differentiate(*case), reference(*case))


def test_gradient_of_a_nearly_certain_entry_keeps_its_digits():
    watched = np.ones((1, 1), np.uint8)
    zero = np.zeros((1, 1), np.float32), np.full(1, 20, np.float32)
    gradient = differentiate(watched, *zero, zero[0], np.zeros(1, np.float32), prior_scale=1e9)[1]
    np.testing.assert_allclose(gradient[3], [np.exp(-20)], rtol=1e-5)


def test_value_of_many_entries_keeps_the_digits_of_float32():
    rng = np.random.default_rng(0)
    watched = (rng.random((1500, 700)) < 0.1).astype(np.uint8)
    shapes = (1500, 2), (1500,), (700, 2), (700,)
    parts = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    value, _ = differentiate(watched, *parts)
    np.testing.assert_allclose(value, reference(watched, *parts)[0], rtol=2e-7)


@pytest.mark.parametrize("prior_scale", [1.0, 0.5])
def test_density_and_gradient_equal_the_joint_distribution(prior_scale):
    watched, *parts = make_case()
    joint = make_joint_distribution(USERS, MOVIES, DIM, prior_scale=prior_scale)
    expected = jax.value_and_grad(lambda *x: joint.log_prob((*x, watched)), PARTS)(*parts)
    close(differentiate(watched, *parts, prior_scale=prior_scale), expected)


@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("chains", [(1,), (3,), (2, 3)])
def test_leading_axes_are_chains(chains, block_size):
    watched, *parts = make_case(chains=chains)
    density = make_log_density(jnp.asarray(watched), block_size=block_size)
    values, backward = jax.vjp(density, *parts)
    assert values.shape == chains
    gradients = backward(jnp.ones(chains))
    for chain in np.ndindex(chains):
        found = values[chain], [part[chain] for part in gradients]
        close(found, reference(watched, *(part[chain] for part in parts)))


@pytest.mark.parametrize("block_size", [None, 5])
def test_vmap_equals_one_chain_each(block_size):
    watched, *parts = make_case(chains=(3,))
    density = make_log_density(jnp.asarray(watched), block_size=block_size)
    values, gradients = jax.vmap(jax.value_and_grad(density, PARTS))(*parts)
    for chain in range(3):
        found = values[chain], [part[chain] for part in gradients]
        close(found, reference(watched, *(part[chain] for part in parts)))


def test_gradient_of_a_scaled_density_is_scaled():
    watched, *parts = make_case()
    density = make_log_density(jnp.asarray(watched))
    plain = jax.grad(density)(*parts)
    scaled = jax.grad(lambda users: -3 * density(users, *parts[1:]))(parts[0])
    np.testing.assert_allclose(scaled, -3 * plain, rtol=1e-6)


def test_gradient_costs_three_products_and_no_autodiff():
    watched, *parts = make_case()
    density = make_log_density(jnp.asarray(watched), block_size=USERS)
    text = str(jax.make_jaxpr(jax.value_and_grad(density, PARTS))(*parts))
    assert text.count("dot_general") == 3


@pytest.mark.parametrize("how", ["leading axis", "vmap"])
def test_gradient_of_two_chains_needs_less_memory_than_one_matrix_of_logits(how):
    num_users, num_movies, dim = 6040, 3706, 20  # Compiled only, at the size of MovieLens 1M.
    shapes = [(2, num_users, dim), (2, num_users), (2, num_movies, dim), (2, num_movies)]
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    watched = jax.ShapeDtypeStruct((num_users, num_movies), jnp.uint8)

    def gradient(watched, *parts):
        density = make_log_density(watched)
        if how == "vmap":
            return jax.vmap(jax.value_and_grad(density, PARTS))(*parts)
        return jax.vjp(density, *parts)[1](jnp.ones(2))

    memory = jax.jit(gradient).lower(watched, *parts).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * num_users * num_movies


# --- masked users


@pytest.mark.parametrize("block_size", [None, 1, 5])
def test_masked_users_contribute_nothing_whatever_they_hold(block_size):
    watched, users, user_bias, *movie_parts = make_case()
    mask = np.arange(USERS) % 3 > 0
    expected = reference(watched[mask], users[mask], user_bias[mask], *movie_parts)
    users[~mask], user_bias[~mask], watched[~mask] = np.nan, np.inf, 1
    value, gradients = differentiate(
        watched, users, user_bias, *movie_parts, mask=jnp.asarray(mask), block_size=block_size
    )
    assert not np.any(gradients[0][~mask])
    assert not np.any(gradients[1][~mask])
    close((value, [gradients[0][mask], gradients[1][mask], *gradients[2:]]), expected)


def test_masked_users_contribute_nothing_to_any_chain():
    watched, users, user_bias, *movie_parts = make_case(chains=(2,))
    mask = np.arange(USERS) % 3 > 0
    density = make_log_density(jnp.asarray(watched), jnp.asarray(mask))
    values = density(users, user_bias, *movie_parts)
    for chain in range(2):
        real = users[chain][mask], user_bias[chain][mask], *(part[chain] for part in movie_parts)
        np.testing.assert_allclose(values[chain], reference(watched[mask], *real)[0], rtol=1e-6)


def test_joint_distribution_ignores_masked_users():
    watched, users, user_bias, *movie_parts = make_case()
    mask = np.arange(USERS) % 3 > 0
    joint = make_joint_distribution(USERS, MOVIES, DIM, mask=jnp.asarray(mask))
    value, gradients = jax.value_and_grad(lambda *x: joint.log_prob((*x, watched)), PARTS)(
        users, user_bias, *movie_parts
    )
    assert not np.any(gradients[0][~mask])
    found = value, [gradients[0][mask], gradients[1][mask], *gradients[2:]]
    close(found, reference(watched[mask], users[mask], user_bias[mask], *movie_parts))


def test_joint_distribution_draws_zeros_for_masked_users():
    mask = np.arange(USERS) % 3 > 0
    joint = make_joint_distribution(USERS, MOVIES, DIM, mask=jnp.asarray(mask))
    draw = joint.sample(seed=jax.random.PRNGKey(0))
    assert draw.watched.dtype == jnp.uint8
    assert draw.watched.shape == (USERS, MOVIES)
    assert np.all(draw.users[mask] != 0)
    assert not np.any(draw.users[~mask])
    assert not np.any(draw.watched[~mask])


def test_momenta_of_masked_users_are_zero():
    mask = np.arange(USERS) % 3 > 0
    momenta = make_momentum_distribution(USERS, MOVIES, DIM, mask=jnp.asarray(mask))
    users, user_bias, movies, movie_bias = momenta.sample(seed=jax.random.PRNGKey(0))
    assert not np.any(users[~mask])
    assert not np.any(user_bias[~mask])
    kinetic = 0.5 * sum(float((part**2).sum()) for part in (users, user_bias, movies, movie_bias))
    count = (mask.sum() + MOVIES) * (DIM + 1)
    found = momenta.log_prob([users, user_bias, movies, movie_bias])
    np.testing.assert_allclose(found, -kinetic - 0.5 * count * np.log(2 * np.pi), rtol=1e-5)


# --- on several devices


def on_eight_devices():
    facts = {}
    case = make_case()
    for count in COUNTS:
        for block_size in (None, 3):
            found = differentiate_on(count, case, block_size=block_size)
            facts[f"density {count} {block_size}"] = found
        facts[f"joint {count}"] = differentiate_on(count, case, joint=True)
    facts["chains"] = differentiate_on(5, make_case(chains=(2,)))
    facts["psums"] = count_psums()
    facts["momenta"] = momenta_by_device()
    # The kernels run for less time than XLA would take to optimize them.
    jax.config.update("jax_disable_most_optimizations", True)
    for name in ("sharded", "plain", "default"):
        facts[f"steps with {name} momenta"] = take_steps(name)
        facts[f"sample with {name} momenta"] = sample_with(name)
    return facts


def differentiate_on(count, case, joint=False, block_size=None):
    watched, users, user_bias, *movie_parts = case
    chains = user_bias.ndim - 1
    by_user = (watched, np.moveaxis(users, -2, 0), np.moveaxis(user_bias, -1, 0))
    (y, users, user_bias), mask = sharding.shard(by_user, count, pad=True)

    def run(y, m, users, user_bias, *movie_parts):
        parts = jnp.moveaxis(users, 0, -2), jnp.moveaxis(user_bias, 0, -1), *movie_parts
        if joint:
            model = make_joint_distribution(y.shape[0], MOVIES, DIM, mask=m, axis_name="i")
            check_sharded_model(model)
            return jax.value_and_grad(lambda *x: model.log_prob((*x, y)), PARTS)(*parts)
        density = make_log_density(y, m, axis_name="i", block_size=block_size)
        values, backward = jax.vjp(density, *parts)
        return values, backward(jnp.ones_like(values))

    mapped = jax.pmap(
        run,
        axis_name="i",
        in_axes=(0, 0, 0, 0, None, None),
        devices=jax.local_devices()[:count],
    )
    values, gradients = mapped(y, mask, users, user_bias, *movie_parts)
    mask, by_device = np.asarray(mask), [np.asarray(part) for part in gradients]
    # [device, (chain,) user, ...] to [(chain,) user, ...]: users that the devices have together.
    by_device[0] = np.moveaxis(np.moveaxis(by_device[0], 1 + chains, 1)[mask], 0, chains)
    by_device[1] = np.moveaxis(np.moveaxis(by_device[1], 1 + chains, 1)[mask], 0, chains)
    return [np.asarray(values).tolist(), [part.tolist() for part in by_device]]


def count_psums():
    watched, *parts = make_case(chains=(2,))

    def gradient(y, *parts):
        values, backward = jax.vjp(make_log_density(y, axis_name="i"), *parts)
        return values, backward(jnp.ones(2))

    text = str(jax.make_jaxpr(gradient, axis_env=[("i", 2)])(watched, *parts))
    return text.count("psum")


def momenta_by_device():
    mask = jnp.asarray([[True] * 4, [True] * 4, [True, True, False, False]])

    def draw(mask):
        momenta = make_momentum_distribution(4, 5, 2, mask=mask, axis_name="i")
        parts = momenta.sample(seed=jax.random.PRNGKey(0))
        return *parts, momenta.log_prob(parts)

    parts = jax.pmap(draw, axis_name="i", devices=jax.local_devices()[:3])(mask)
    return [np.asarray(part).tolist() for part in parts]


def hmc_data():
    rng = np.random.default_rng(0)
    watched = (rng.random((HMC_USERS, HMC_MOVIES)) < 0.3).astype(np.uint8)
    return sharding.shard(watched, HMC_DEVICES, pad=True)


def hmc_kernel(name):
    def kernel_fn(watched, mask):
        sizes = (watched.shape[0], HMC_MOVIES, HMC_DIM)
        momenta = {
            "sharded": lambda: make_momentum_distribution(*sizes, mask=mask, axis_name="i"),
            "plain": lambda: make_momentum_distribution(*sizes, mask=mask),
            "default": lambda: None,
        }[name]()
        return tfp.experimental.mcmc.PreconditionedHamiltonianMonteCarlo(
            make_log_density(watched, mask, axis_name="i"),
            # Others' kinetic energy is missing from the sum without sharded momenta: small steps,
            # or nobody accepts anything.
            np.float32(0.3 if name == "sharded" else 0.05),
            num_leapfrog_steps=4,
            momentum_distribution=momenta,
        )

    return kernel_fn


def take_steps(name):
    """Movies and acceptance on each device, with nobody to check them."""
    watched, mask = hmc_data()
    state = make_initial_state(mask, HMC_MOVIES, HMC_DIM, num_chains=2, seed=0)

    def run(watched, mask, *state):
        _, (movies, accepted) = tfp.mcmc.sample_chain(
            HMC_DRAWS,
            list(state),
            kernel=hmc_kernel(name)(watched, mask),
            trace_fn=lambda state, results: (state[2], results.is_accepted),
            seed=jax.random.PRNGKey(1),
        )
        return movies, accepted

    mapped = jax.pmap(
        run,
        axis_name="i",
        in_axes=(0, 0, 0, 0, None, None),
        devices=jax.local_devices()[:HMC_DEVICES],
    )
    movies, accepted = mapped(watched, mask, *state)
    return [np.asarray(movies).tolist(), np.asarray(accepted).tolist()]


def sample_with(name):
    watched, mask = hmc_data()
    try:
        draws = sampling.sample(
            hmc_kernel(name),
            make_initial_state(mask, HMC_MOVIES, HMC_DIM, num_chains=2, seed=0),
            (watched, mask),
            num_draws=HMC_DRAWS,
            num_warmup=0,
            seed=1,
            axis_name="i",
            devices=jax.local_devices()[:HMC_DEVICES],
            replicated=[False, False, True, True],
            progress=False,
        )
    except ValueError as error:
        return str(error)
    return [part.tolist() for part in draws.states]


def names():
    return [f"density {n} {b}" for n in COUNTS for b in (None, 3)] + [f"joint {n}" for n in COUNTS]


@pytest.mark.parametrize("name", names())
def test_every_device_has_the_total_density_and_gradient(facts, name):
    values, (users, user_bias, movies, movie_bias) = facts[name]
    assert len(values) == int(name.split()[1])
    for device, value in enumerate(values):
        found = value, [users, user_bias, movies[device], movie_bias[device]]
        close(found, reference(*make_case()))


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("density")])
def test_devices_have_the_same_bits(facts, name):
    values, (_, _, movies, movie_bias) = facts[name]
    for part in (values, movies, movie_bias):
        assert all(copy == part[0] for copy in part)


def test_chains_over_sharded_users_equal_float64(facts):
    values, (users, user_bias, movies, movie_bias) = facts["chains"]
    watched, *parts = make_case(chains=(2,))
    for chain in range(2):
        gradients = users[chain], user_bias[chain], movies[4][chain], movie_bias[4][chain]
        expected = reference(watched, *(part[chain] for part in parts))
        close((values[4][chain], gradients), expected)


def test_all_chains_share_one_psum(facts):
    assert facts["psums"] == 1


# --- momenta and HMC on several devices


def test_momenta_differ_by_device_for_users_and_not_for_movies(facts):
    users, user_bias, movies, movie_bias, _ = map(np.asarray, facts["momenta"])
    assert np.all(users[0] != users[1])
    assert np.all(user_bias[0] != user_bias[1])
    assert np.all(movies == movies[0])
    assert np.all(movie_bias == movie_bias[0])


def test_kinetic_energy_is_that_of_all_devices(facts):
    users, user_bias, movies, movie_bias, log_prob = map(np.asarray, facts["momenta"])
    squares = (users**2).sum() + (user_bias**2).sum() + (movies[0] ** 2).sum()
    squares += (movie_bias[0] ** 2).sum()
    count = (10 + 5) * 3  # 10 real users and 5 movies
    expected = -0.5 * squares - 0.5 * count * np.log(2 * np.pi)
    np.testing.assert_allclose(log_prob, [expected] * 3, rtol=1e-5)


def test_movies_stay_equal_on_all_devices_with_sharded_momenta(facts):
    movies, accepted = map(np.asarray, facts["steps with sharded momenta"])
    assert accepted.mean() > 0.5
    assert np.all(movies == movies[0])
    assert np.all(accepted == accepted[0])
    assert not np.array_equal(movies[0, 0], movies[0, -1])


@pytest.mark.parametrize("name", ["plain", "default"])
def test_devices_disagree_without_sharded_momenta(facts, name):
    # What makes the sharded momentum distribution necessary: each accepts for itself.
    movies, accepted = map(np.asarray, facts[f"steps with {name} momenta"])
    assert np.any(accepted != accepted[0])
    assert np.abs(movies[:, -1] - movies[0, -1]).max() > 0.1


@pytest.mark.parametrize("name", ["plain", "default"])
def test_sampling_refuses_momenta_that_are_not_sharded(facts, name):
    message = facts[f"sample with {name} momenta"]
    assert isinstance(message, str)
    assert "not the same on all 3 devices" in message


def test_padding_does_not_move_while_sampling(facts):
    users, user_bias, movies, movie_bias = map(np.asarray, facts["sample with sharded momenta"])
    assert users.shape == (HMC_DRAWS, 3, 2, 7, HMC_DIM)
    assert user_bias.shape == users.shape[:-1]
    assert movies.shape == (HMC_DRAWS, 2, HMC_MOVIES, HMC_DIM)
    assert movie_bias.shape == movies.shape[:-1]
    assert not np.any(users[:, 2, :, 6])
    assert not np.any(user_bias[:, 2, :, 6])
    moved = users[-1] != users[0]
    assert np.all(moved[:2])
    assert np.all(moved[2, :, :6])


# --- recovery


def simulate(num_users, num_movies, dim, seed):
    """Watch matrix and logits, drawn from the model."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_users, dim)) @ rng.normal(size=(dim, num_movies))
    logits += rng.normal(size=(num_users, 1)) + rng.normal(size=num_movies)
    watched = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return watched.astype(np.uint8), logits


@pytest.fixture(scope="module")
def recovered():
    """True logits, popularity's, and draws of them `[num_draws * chains, users, movies]`."""
    num_users, num_movies, dim = 60, 40, 2
    watched, logits = simulate(num_users, num_movies, dim, seed=0)
    data = sharding.shard((watched, np.ones(num_users, bool)), 1)

    def kernel_fn(watched, mask):
        return tfp.experimental.mcmc.PreconditionedHamiltonianMonteCarlo(
            make_log_density(watched, axis_name="i"),
            np.float32(0.1),
            num_leapfrog_steps=12,
            momentum_distribution=make_momentum_distribution(
                num_users, num_movies, dim, axis_name="i"
            ),
        )

    draws = sampling.sample(
        kernel_fn,
        make_initial_state(data[1], num_movies, dim, num_chains=2, seed=0),
        data,
        num_draws=500,
        num_warmup=200,
        seed=0,
        axis_name="i",
        devices=jax.local_devices()[:1],
        replicated=[False, False, True, True],
        progress=False,
    )
    users, user_bias, movies, movie_bias = draws.states
    found = np.einsum("scik,scjk->scij", users[:, 0], movies)
    found += user_bias[:, 0, :, :, None] + movie_bias[:, :, None, :]
    share = (watched.sum(0) + 0.5) / (num_users + 1)
    popularity = np.broadcast_to(np.log(share / (1 - share)), logits.shape)
    return logits, popularity, found.reshape(-1, *logits.shape)


def test_posterior_mean_logits_are_closer_to_the_truth_than_popularity(recovered):
    logits, popularity, draws = recovered
    ours = np.sqrt(np.mean((draws.mean(0) - logits) ** 2))
    theirs = np.sqrt(np.mean((popularity - logits) ** 2))
    assert ours < 0.6 * theirs


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_cover_the_true_logits_as_often_as_they_say(recovered, level):
    logits, _, draws = recovered
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    coverage = np.mean((low <= logits) & (logits <= high))
    assert coverage == pytest.approx(level, abs=0.06)


# --- initial state


def test_users_start_at_the_same_place_on_any_number_of_devices():
    users = np.arange(10)
    states = []
    for num_devices, per_device in ((1, 10), (3, 4), (4, 3)):
        mask = (np.arange(num_devices * per_device) < len(users)).reshape(num_devices, per_device)
        state = make_initial_state(mask, 5, 2, num_chains=3, seed=0)
        assert [part.shape for part in state] == [
            (num_devices, 3, per_device, 2),
            (num_devices, 3, per_device),
            (3, 5, 2),
            (3, 5),
        ]
        assert all(part.dtype == np.float32 for part in state)
        by_user = [np.moveaxis(part, 1, 2) for part in state[:2]]
        assert not any(np.any(part[~mask]) for part in by_user)
        states.append([part[mask] for part in by_user] + state[2:])
    for state in states[1:]:
        for part, first in zip(state, states[0], strict=True):
            np.testing.assert_array_equal(part, first)


def test_initial_state_has_the_scale_and_differs_by_seed_and_chain():
    mask = np.ones((1, 2000), bool)
    users, *_ = make_initial_state(mask, 5, 2, num_chains=2, seed=0, scale=0.3)
    other, *_ = make_initial_state(mask, 5, 2, num_chains=2, seed=1, scale=0.3)
    assert users.std() == pytest.approx(0.3, rel=0.05)
    assert np.all(users[:, 0] != users[:, 1])
    assert np.all(users != other)


@pytest.mark.parametrize("mask", [np.ones(3, bool), np.ones((1, 3)), np.zeros((1, 3), bool)])
def test_initial_state_without_a_mask_by_device_is_refused(mask):
    with pytest.raises(ValueError, match=r"mask must be bool \[num_devices, users_per_device\]"):
        make_initial_state(mask, 5, 2, num_chains=1, seed=0)


# --- bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"watched": np.zeros(3, np.uint8)}, ValueError, r"must be \[num_users, num_movies\]"),
        ({"watched": np.zeros((3, 0), np.uint8)}, ValueError, "not empty"),
        ({"watched": np.zeros((43, 11), np.float32)}, TypeError, "must be uint8 or bool"),
        ({"mask": np.ones(42, bool)}, ValueError, r"mask must be bool \[43\]"),
        ({"mask": np.ones(43, np.float32)}, ValueError, r"mask must be bool \[43\]"),
        ({"prior_scale": 0}, ValueError, "prior_scale must be a positive number, given 0"),
        ({"block_size": 0}, ValueError, "block_size must be a positive number"),
    ],
)
def test_bad_data_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        make_log_density(**({"watched": make_case()[0]} | change))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("how", ["shape", "chains"])
def test_parameters_of_the_wrong_shape_are_refused(part, how):
    watched, *parts = make_case(chains=(2,))
    parts[part] = parts[part][:, 1:] if how == "shape" else parts[part][0]
    with pytest.raises(ValueError, match="users, user_bias, movies and movie_bias must be"):
        make_log_density(watched)(*parts)


@pytest.mark.parametrize("make", [make_joint_distribution, make_momentum_distribution])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_users": 0}, "num_users must be a positive number, given 0"),
        ({"num_movies": 0}, "num_movies must be a positive number, given 0"),
        ({"dim": -1}, "dim must be a positive number, given -1"),
        ({"mask": np.ones(2, bool)}, r"mask must be bool \[3\]"),
    ],
)
def test_distributions_of_bad_sizes_are_refused(make, change, message):
    with pytest.raises(ValueError, match=message):
        make(**({"num_users": 3, "num_movies": 4, "dim": 2} | change))


if __name__ == "__main__":
    print(json.dumps(on_eight_devices()))
