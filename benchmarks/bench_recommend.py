"""Recommending with all draws at once against a Python loop over draws.

`python benchmarks/bench_recommend.py [--quick]`. For one user, one loop gives all that ours gives;
two do the least that gives the same counts: a product, a mask and the k best. For all users, what
is judged is peak memory, of a process of its own, because draws x users x movies would be 90 GB at
MovieLens 1M's size.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

import _report
import jax
import jax.numpy as jnp
import numpy as np

from helpers import recommend

NUM_DRAWS, USERS, MOVIES, DIM, K = 1000, 6040, 3706, 20, 10
SAMPLE_INTERVAL = 0.02  # seconds


def make_draws(num_draws, num_users, num_movies, dim):
    """Draws of two chains, `num_draws` in all, and a watch matrix uint8."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((num_draws // 2, 2, *shape), np.float32)

    draws = recommend.Draws(
        normal(num_users, dim), normal(num_users), normal(num_movies, dim), normal(num_movies)
    )
    return draws, (rng.random((num_users, num_movies)) < 0.05).astype(np.uint8)


def full_loop(draws, user, seen, k):
    """All that `recommend` gives, as a loop over draws is first written with `jax.numpy`."""
    seen = jnp.asarray(seen, bool)
    counts = jnp.zeros(len(seen), jnp.int32)
    probabilities, first = 0.0, []
    for index in np.ndindex(draws.user_bias.shape[:2]):
        logits = jnp.asarray(draws.movies[index]) @ draws.users[index][user]
        logits = logits + draws.user_bias[index][user] + draws.movie_bias[index]
        probabilities = probabilities + jax.nn.sigmoid(logits)
        best = jnp.argsort(-jnp.where(seen, -jnp.inf, logits))[:k]
        counts = counts.at[best].add(1)
        first.append(best[0])
    return np.asarray(counts), np.asarray(first), np.asarray(probabilities) / len(first)


def jax_loop(draws, user, seen, k):
    """Counts `[num_movies]`, one call of JAX after the other for each draw."""
    seen = jnp.asarray(seen, bool)
    counts = np.zeros(len(seen), np.int64)
    for index in np.ndindex(draws.user_bias.shape[:2]):
        logits = jnp.asarray(draws.movies[index]) @ draws.users[index][user]
        logits = logits + draws.movie_bias[index]
        _, best = jax.lax.top_k(jnp.where(seen, -jnp.inf, logits), k)
        counts[np.asarray(best)] += 1
    return counts


def numpy_loop(draws, user, seen, k):
    """The same in NumPy alone, the best that a loop over draws can do here."""
    seen = np.asarray(seen, bool)
    counts = np.zeros(len(seen), np.int64)
    for index in np.ndindex(draws.user_bias.shape[:2]):
        logits = draws.movies[index] @ draws.users[index][user] + draws.movie_bias[index]
        logits[seen] = -np.inf
        counts[np.argpartition(-logits, k)[:k]] += 1
    return counts


def one_user(quick):
    draws, watched = make_draws(NUM_DRAWS, 8, MOVIES, DIM)
    # As after a first call in a notebook: the movies are on the device already.
    on_device = recommend.Draws(*jax.device_put(tuple(draws)))
    seen = watched[3]
    calls = {
        "ours": lambda: recommend.recommend(draws, 3, seen, K),
        "ours, draws on the device": lambda: recommend.recommend(on_device, 3, seen, K),
        "loop in JAX, the same results": lambda: full_loop(draws, 3, seen, K),
        "loop in JAX": lambda: jax_loop(draws, 3, seen, K),
        "loop in NumPy": lambda: numpy_loop(draws, 3, seen, K),
    }
    times = _report.time_interleaved(calls, 5.0 if quick else 30.0, min_turns=3)
    rows = [
        _report.ratio_row(name, times, name, reference, target)
        for name in list(calls)[:2]
        for reference, target in (
            ("loop in JAX, the same results", 0.02),
            ("loop in JAX", None),
            ("loop in NumPy", None),
        )
    ]
    _report.print_table(
        f"One user, {NUM_DRAWS} draws, {MOVIES} movies, dim {DIM}, the {K} best of each draw",
        rows,
        "The other loops count only. Reading the movies' draws from memory once is the floor: "
        f"{4e-6 * NUM_DRAWS * MOVIES * (DIM + 1):.0f} MB.",
    )


def all_users(quick):
    num_draws = 20 if quick else 100
    script = str(Path(__file__).resolve())
    rows = []
    for name in ("first_by_draw", "predict"):
        try:
            result = _report.run_child(script, ["--child", name, str(num_draws)], timeout=400)
        except _report.ChildError as error:
            print(f"{name}: no result: {error}")
            continue
        pairs = num_draws * USERS * MOVIES
        rows.append(
            {
                "function": name,
                "ms a draw": f"{1e3 * result['seconds'] / num_draws:.0f}",
                "users/s, 1,000 draws": f"{USERS / result['seconds'] * num_draws / 1000:.0f}",
                "million logits/s": f"{pairs / result['seconds'] / 1e6:.0f}",
                "memory above the draws, MB": f"{result['peak'] / 1e6:.0f}",
                "all logits, MB": f"{4 * pairs / 1e6:.0f}",
            }
        )
    _report.print_table(f"All {USERS} users, {num_draws} draws, in blocks of draws", rows)


def child(name, num_draws, output):
    import threading

    import psutil

    draws, watched = make_draws(num_draws, USERS, MOVIES, DIM)
    few = recommend.Draws(*(part[:1] for part in draws))
    arguments = (watched,) if name == "first_by_draw" else ()
    call = getattr(recommend, name)
    call(few, *arguments, progress=False)  # starts JAX
    process, peak, done = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch():
        nonlocal peak
        while not done.wait(SAMPLE_INTERVAL):
            peak = max(peak, process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    call(draws, *arguments)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    _report.write_result(output, {"seconds": seconds, "peak": peak})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns and draws")
    parser.add_argument("--child", nargs=2, metavar=("FUNCTION", "DRAWS"))
    parser.add_argument("output", nargs="?")
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]), options.output)
        return
    _report.exit_on_sigterm()
    print(_report.machine_line(("jax", "jaxlib", "numpy")))
    one_user(options.quick)
    all_users(options.quick)


if __name__ == "__main__":
    main()
