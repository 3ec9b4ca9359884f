"""A leapfrog step of the matrix factorization, MovieLens 1M's size: ours against autodiff.

`python benchmarks/bench_matrix_factorization.py [--quick]`. It runs on one device, which uses all
cores. Called in turns with ours are TFP's joint distribution by autodiff, a density in plain JAX by
autodiff, and the three matrix products that no implementation can do without. They take chains one
by one; TFP's own batch of chains is timed apart, as XLA runs batches of products slowly on CPUs.
Memory is what XLA reserves for temporaries beside arguments and results.
"""

import argparse
import os

# One device: forced host devices would share the cores anyway.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TFP imports TensorFlow in lane A.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

import jax
import jax.numpy as jnp
import numpy as np
from _report import machine_line, print_table, ratio_row, time_interleaved

from helpers.models import matrix_factorization as model

USERS, MOVIES, DIM = 6040, 3706, 20
DENSITY = 1_000_209 / (USERS * MOVIES)
LOGITS_BYTES = 4 * USERS * MOVIES
STEP_SIZE = 1e-3
OURS, AUTODIFF, PLAIN, PRODUCTS = "ours", "TFP by autodiff", "JAX by autodiff", "three products"


def make_data(num_users, num_movies, dim, num_chains):
    """A watch matrix, positions and momenta; NumPy arrays."""
    rng = np.random.default_rng(0)
    watched = (rng.random((num_users, num_movies)) < DENSITY).astype(np.uint8)
    mask = np.ones((1, num_users), bool)

    def draw(seed):
        users, user_bias, movies, movie_bias = model.make_initial_state(
            mask, num_movies, dim, num_chains=num_chains, seed=seed, scale=0.3
        )
        return users[0], user_bias[0], movies, movie_bias

    return watched, draw(1), draw(2)


def leapfrog(value_and_gradient, watched, position, momentum):
    """Moves the position, then the momentum: of a trajectory, a step costs one gradient."""
    position = [p + STEP_SIZE * m for p, m in zip(position, momentum)]
    value, gradient = value_and_gradient(watched, position)
    return value, position, [m + STEP_SIZE * g for m, g in zip(momentum, gradient)]


def ours(watched, position):
    return with_pullback(model.make_log_density(watched), position)


def batched(watched, position):
    """TFP's joint distribution by autodiff, all chains at a time."""
    num_users, num_movies = watched.shape
    joint = model.make_joint_distribution(num_users, num_movies, position[0].shape[-1])
    return with_pullback(lambda *parts: joint.log_prob((*parts, watched)), position)


def autodiff(watched, position):
    """The same, chain by chain."""
    return jax.lax.map(lambda chain: batched(watched, chain), position)


def plain(watched, position):
    """A density written down in JAX, without TFP, by autodiff; its constants are left out."""

    def density(users, user_bias, movies, movie_bias):
        logits = users @ movies.T + user_bias[:, None] + movie_bias
        log_likelihood = (watched * logits - jax.nn.softplus(logits)).sum()
        parameters = (users, user_bias, movies, movie_bias)
        return log_likelihood - 0.5 * sum((part**2).sum() for part in parameters)

    return jax.lax.map(lambda chain: with_pullback(density, chain), position)


def products(watched, position):
    """Logits, and what stands in for the residual times movies and times users, chain by chain."""
    users, user_bias, movies, movie_bias = position

    def of_chain(chain):
        users, movies = chain
        logits = users @ movies.T
        return logits[0, 0], logits @ movies, logits.T @ users

    value, by_users, by_movies = jax.lax.map(of_chain, (users, movies))
    return value, [by_users, user_bias, by_movies, movie_bias]


def with_pullback(density, position):
    """Values `[...]` and their gradients; chains do not meet, so one pullback gives all."""
    value, pull = jax.vjp(density, *position)
    return value, list(pull(jnp.ones_like(value)))


def compile_step(function, *arguments):
    """Compiles a leapfrog step; returns a call of it, and its bytes of temporaries."""
    step = jax.jit(lambda *arguments: leapfrog(function, *arguments))
    compiled = step.lower(*arguments).compile()
    size = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*arguments)), size


IMPLEMENTATIONS = {OURS: ours, AUTODIFF: autodiff, PLAIN: plain, PRODUCTS: products}
TARGETS = {AUTODIFF: 0.5, PLAIN: None, PRODUCTS: 1.6}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns, no batch of chains")
    options = parser.parse_args()
    print(machine_line(("jax", "jaxlib", "numpy")))
    rows, sizes = [], []
    for num_chains in (1, 2):
        arguments = jax.device_put(make_data(USERS, MOVIES, DIM, num_chains))
        calls = {}
        for name, function in IMPLEMENTATIONS.items():
            calls[name], size = compile_step(function, *arguments)
            sizes.append(memory_row(num_chains, name, size))
        times = time_interleaved(calls, 5.0 if options.quick else 40.0)
        case = f"{num_chains} chain{'s' if num_chains > 1 else ''}"
        rows += [ratio_row(case, times, OURS, name, target) for name, target in TARGETS.items()]
    if not options.quick:
        calls = {OURS: calls[OURS], "TFP's batch": compile_step(batched, *arguments)[0]}
        times = time_interleaved(calls, 5.0, min_turns=3)
        rows.append(ratio_row(case, times, OURS, "TFP's batch"))
    print_table(
        f"A leapfrog step, {USERS} users x {MOVIES} movies, dim {DIM}",
        rows,
        "Times are of all chains together.",
    )
    print_table(
        "Temporaries of a step",
        sizes,
        f"A float32 matrix of logits is {LOGITS_BYTES / 1e6:.0f} MB.",
    )


def memory_row(num_chains, name, size):
    each = size / num_chains
    target = f"< 1 {'met' if each < LOGITS_BYTES else 'missed'}" if name == OURS else ""
    return {
        "chains": num_chains,
        "leapfrog": name,
        "MB a chain": f"{each / 1e6:.1f}",
        "in matrices of logits": f"{each / LOGITS_BYTES:.2f}",
        "target": target,
    }


if __name__ == "__main__":
    main()
