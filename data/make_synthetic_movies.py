"""Makes synthetic-movies.zip: invented users, movies and ratings with the schema of MovieLens.

    python data/make_synthetic_movies.py

MovieLens' licence does not allow to pass it on, so the repository bundles this instead. Nothing in
it comes from MovieLens. The files are in the format of ml-latest-small:

- 600 users have tastes: a normal number a genre. Some like a genre much, so that tastes can be told
  from views.
- 410 movies have up to three genres each, and a popularity with a long tail. The last ten have
  never been watched; some have no genre; titles are put together from words and are unique.
- A user watches movies without replacement, with odds of exp(popularity + taste for its genres).
  How many follows a log-normal distribution, from a single one up to over half of all.
- Stars follow the taste for a movie. A few movies are rated twice by a user.
- Ids have gaps, as after deletions.

The content depends on the seed only (a test makes it again and compares).
"""

import csv
import io
import zipfile
from pathlib import Path

import numpy as np

NUM_USERS, NUM_MOVIES, NUM_UNWATCHED, NUM_REPEATED = 600, 400, 10, 5
SEED = 20_240_601
GENRES = ["Adventure", "Animation", "Comedy", "Crime", "Documentary", "Drama", "Fantasy", "Horror"]
GENRES += ["Musical", "Romance", "Sci-Fi", "Western"]
# fmt: off
ADJECTIVES = [
    "Amber", "Broken", "Crimson", "Distant", "Electric", "Final", "Gentle", "Hollow",
    "Invisible", "Jagged", "Last", "Midnight", "Northern", "Opal", "Paper", "Quiet",
    "Restless", "Silver", "Twisted", "Unwritten", "Velvet", "Wandering", "Yellow", "Zéphyr",
]
NOUNS = [
    "Anchor", "Bridge", "Carnival", "Desert", "Engine", "Falcon", "Garden", "Harbour",
    "Island", "Journey", "Kingdom", "Lantern", "Mirror", "Notebook", "Orchard", "Pilot",
    "Queen", "River", "Station", "Tower", "Umbrella", "Voyage", "Winter", "Yard", "Café",
]
# fmt: on
OUT = Path(__file__).with_name("synthetic-movies.zip")


def make_titles(rng, count):
    """Unique titles with years; one in four begins with an article, put behind a comma."""
    pairs = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
    chosen = rng.permutation(len(pairs))[:count]
    years = rng.integers(1950, 2020, count)
    titles = []
    for index, year in zip(chosen, years):
        adjective, noun = pairs[index]
        ending = ", The" if index % 4 == 0 else ""
        titles.append(f"{adjective} {noun}{ending} ({year})")
    return titles


def make_genres(rng, count):
    """0 or 1, `[count, genres]`: mostly one or two genres, sometimes three or none."""
    genres = np.zeros((count, len(GENRES)), int)
    numbers = rng.choice(4, count, p=[0.03, 0.52, 0.33, 0.12])
    for row, number in enumerate(numbers):
        genres[row, rng.permutation(len(GENRES))[:number]] = 1
    return genres


def make_views(rng, genres):
    """Lists (user, movie, stars, timestamp), user by user."""
    tastes = 1.4 * rng.standard_normal((NUM_USERS, len(GENRES)))
    popularity = 1.1 * rng.standard_normal(NUM_MOVIES)
    quality = 0.5 * rng.standard_normal(NUM_MOVIES)
    activity = np.exp(3.3 + 0.8 * rng.standard_normal(NUM_USERS)).astype(int)
    activity = np.clip(activity, 1, 240)
    activity[[17, 402]] = 1, 240
    views = []
    for user in range(NUM_USERS):
        liking = genres[:NUM_MOVIES] @ tastes[user]
        # The largest of log odds with Gumbel noise are draws without replacement.
        odds = popularity + liking + rng.gumbel(size=NUM_MOVIES)
        watched = np.argsort(-odds)[: activity[user]]
        stars = 3.2 + 0.4 * liking + quality + 0.6 * rng.standard_normal(NUM_MOVIES)
        start = rng.integers(1_000_000_000, 1_500_000_000)
        times = start + np.cumsum(rng.integers(20, 90_000, len(watched)))
        for movie, time in zip(watched, times):
            views.append((user, movie, int(np.clip(np.round(stars[movie]), 1, 5)), int(time)))
    for index in rng.permutation(len(views))[:NUM_REPEATED]:
        user, movie, stars, time = views[index]
        views.append((user, movie, 6 - stars, time + 1_000_000))
    return views


def make_files():
    """The content of the two files by name, as text."""
    rng = np.random.default_rng(SEED)
    count = NUM_MOVIES + NUM_UNWATCHED
    titles, genres = make_titles(rng, count), make_genres(rng, count)
    views = make_views(rng, genres)
    user_ids = np.cumsum(rng.integers(1, 4, NUM_USERS))
    movie_ids = np.cumsum(rng.integers(1, 6, count))
    movies = [
        (
            movie_ids[row],
            titles[row],
            "|".join(name for name, has in zip(GENRES, genres[row]) if has) or "(no genres listed)",
        )
        for row in range(count)
    ]
    ratings = [(user_ids[u], movie_ids[m], float(stars), time) for u, m, stars, time in views]
    return {
        "ratings.csv": to_csv(["userId", "movieId", "rating", "timestamp"], ratings),
        "movies.csv": to_csv(["movieId", "title", "genres"], movies),
    }


def to_csv(header, rows):
    """Rows as comma-separated text, quoted where a field holds a comma."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def main():
    """Writes the zip file beside this script."""
    with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in make_files().items():
            # With a fixed date, so that the file only changes with its content.
            entry = zipfile.ZipInfo(name, (2024, 6, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text.encode())


if __name__ == "__main__":
    main()
