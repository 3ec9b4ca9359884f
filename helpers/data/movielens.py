"""Who watched which movie: MovieLens from TensorFlow Datasets or its archives, or what is bundled.

MovieLens must not be passed on, so this repository holds none of it. What is bundled is synthetic;
`data/make_synthetic_movies.py` made it.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from helpers.data.errors import DataError
from helpers.data.movielens_files import Movie, Tables, clean_genres, read_archive

Source = Literal["bundled", "archive", "tfds"]
SOURCES = ("bundled", "archive", "tfds")
DATA_DIR = Path(__file__).resolve().parents[2] / "data"
BUNDLED = DATA_DIR / "synthetic-movies.zip"

_TFDS_NAME = "movielens/1m-ratings"
_TFDS_FEATURES = (
    "user_id", "movie_id", "user_rating", "timestamp", "movie_title", "movie_genres"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ViewDataset:
    """Views of movies by users, and where they came from.

    A view is a rating: whoever rated a movie has watched it. A user may have rated a movie twice;
    these are two views, and one entry of the watch matrix. Users and movies are numbered in order
    of first appearance in the ratings. A movie that was never rated has no number and no column.

    Attributes:
      source: 'bundled', 'archive' or 'tfds'.
      name: Name of the data set: 'synthetic', 'ml-1m', 'movielens/1m-ratings'…
      users: Number of each view's user, int32 `[num_views]`.
      movies: Number of each view's movie, int32 `[num_views]`.
      rating: Stars, 0.5 to 5, float32 `[num_views]`.
      timestamp: Seconds since 1970, int64 `[num_views]`.
      user_ids: Ids of users in the source, int64 `[num_users]`; they have gaps.
      movie_ids: Ids of movies in the source, int64 `[num_movies]`; they have gaps.
      titles: A title a movie, mostly with its year; two movies may share one.
      genres: Which genres each movie has, bool `[num_movies, num_genres]`; a row may have several
        or none.
      genre_names: A name a genre, those that some rated movie has, sorted.
      num_unrated: Movies of the source that nobody rated; None from 'tfds', whose table of ratings
        does not say.
    """

    source: str
    name: str
    users: np.ndarray
    movies: np.ndarray
    rating: np.ndarray
    timestamp: np.ndarray
    user_ids: np.ndarray
    movie_ids: np.ndarray
    titles: tuple[str, ...]
    genres: np.ndarray
    genre_names: tuple[str, ...]
    num_unrated: int | None

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.user_ids)

    @property
    def num_movies(self) -> int:
        """Number of movies that someone rated."""
        return len(self.movie_ids)

    @property
    def num_views(self) -> int:
        """Number of views, repeated ones included."""
        return len(self.users)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the watch matrix, users and movies."""
        return self.num_users, self.num_movies

    @property
    def density(self) -> float:
        """Share of the watch matrix that is 1."""
        return len(self._entries()) / (self.num_users * self.num_movies)

    @property
    def views_per_user(self) -> np.ndarray:
        """Number of different movies that each user watched, int64 `[num_users]`."""
        return np.bincount(self._entries() // self.num_movies, minlength=self.num_users)

    @property
    def checksum(self) -> str:
        """SHA-256 of all arrays, their dtypes and shapes, titles and genres, in hexadecimal.

        The order of the views counts: TFDS stores those of ml-1m in another order than the archive,
        so the two sources number users and movies differently and have different checksums.
        """
        digest = hashlib.sha256()
        for array in (
            self.users, self.movies, self.rating, self.timestamp, self.user_ids, self.movie_ids,
            self.genres,
        ):  # fmt: skip
            digest.update(f"{array.dtype.str} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        # Behind each text a zero, which is in none: ("ab", "c") is not ("a", "bc").
        for texts in (self.titles, self.genre_names):
            digest.update(f"text {len(texts)};".encode())
            digest.update("".join(f"{text}\0" for text in texts).encode())
        return digest.hexdigest()

    def watch_matrix(self) -> np.ndarray:
        """Tells who watched what.

        Returns:
          uint8 `[num_users, num_movies]`, 1 where the user watched the movie, else 0.
        """
        return _matrix(self._entries(), self.shape)

    def _entries(self) -> np.ndarray:
        """Flat indices of the ones of the watch matrix, sorted, int64."""
        return np.unique(self.users.astype(np.int64) * self.num_movies + self.movies)

    def __str__(self) -> str:
        views = self.views_per_user
        repeated = self.num_views - int(views.sum())
        notes = [f"{repeated:,} repeated"] if repeated else []
        if self.num_unrated:
            notes.append(f"{self.num_unrated:,} movies without any have no column")
        aside = f" ({'; '.join(notes)})" if notes else ""
        return (
            f"{self.name} from {self.source}: {self.num_users:,} users x {self.num_movies:,} "
            f"movies, {self.num_views:,} views{aside}, "
            f"density {self.density:.2%}, sha256 {self.checksum[:12]}\n"
            f"movies a user watched: {views.min():,} to {views.max():,}, median "
            f"{np.median(views):,g}"
        )


def load_movielens(
    source: Source = "bundled", *, data_dir: str | Path | None = None
) -> ViewDataset:
    """Loads views of movies by users.

    Args:
      source: 'bundled', a synthetic set in the format of MovieLens; 'archive', the official ml-1m,
        ml-100k or ml-latest-small, zipped or not, in `data_dir`; 'tfds', ml-1m by TensorFlow
        Datasets (`movielens/1m-ratings`), which downloads it on first use.
      data_dir: Where the files of 'archive' are (the zip file or its folder itself will do too), or
        where TFDS keeps its data sets; by default the repository's `data/` and `data/tfds/`.

    Returns:
      The views, in the order of the source. Movies that nobody rated are left out.

    Raises:
      ValueError: `source` is unknown.
      DataError: A file is missing, damaged, in another encoding or ambiguous, or MovieLens cannot
        be downloaded or stored.
    """
    if source == "bundled":
        return _dataset("bundled", _read_bundled())
    if source == "archive":
        return _dataset("archive", read_archive(Path(data_dir or DATA_DIR)))
    if source == "tfds":
        return _dataset("tfds", _read_tfds(Path(data_dir or DATA_DIR / "tfds")))
    raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, given {source!r}")


def split_views(
    dataset: ViewDataset, *, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Holds out a share of the movies that each user watched.

    Of a user who watched n different movies, `fraction * n` of them, rounded, are held out at
    random, but at most n - 1: someone with one view loses none.

    Args:
      dataset: The views.
      fraction: Share to hold out, above 0 and below 1.
      seed: Of NumPy's generator.

    Returns:
      Watch matrices to train on and held out, uint8 `[num_users, num_movies]`. Their sum is
      `dataset.watch_matrix()`. A movie may have lost all of its views.

    Raises:
      ValueError: `fraction` is out of range.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be above 0 and below 1, given {fraction}")
    entries = dataset._entries()
    users = entries // dataset.num_movies
    counts = dataset.views_per_user
    num_held_out = np.minimum(np.rint(fraction * counts).astype(np.int64), counts - 1)
    # Shuffled within each user, of whom the first ones are held out. `users` is sorted, so that the
    # order by user and random number leaves every user where they were.
    order = np.lexsort((np.random.default_rng(seed).random(len(entries)), users))
    place = np.arange(len(entries)) - (np.cumsum(counts) - counts)[users]
    is_held_out = np.zeros(len(entries), bool)
    is_held_out[order] = place < num_held_out[users]
    shape = dataset.shape
    return _matrix(entries[~is_held_out], shape), _matrix(entries[is_held_out], shape)


def _matrix(entries: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    matrix = np.zeros(shape, np.uint8)
    matrix.reshape(-1)[entries] = 1
    return matrix


def _read_bundled() -> Tables:
    if not BUNDLED.is_file():
        raise DataError(
            f"{BUNDLED} is not there; run data/make_synthetic_movies.py of the repository, which "
            "makes it"
        )
    return read_archive(BUNDLED)._replace(name="synthetic")


def _read_tfds(folder: Path) -> Tables:
    from helpers.data import tfds

    columns = tfds.load_arrays(_TFDS_NAME, folder, ("train",), _TFDS_FEATURES)["train"]
    user_id, movie_id, rating, timestamp, titles, genres = columns
    genre_names = tfds.load_class_names(_TFDS_NAME, folder, "movie_genres")
    user_id, movie_id = (ids.astype(np.bytes_).astype(np.int64) for ids in (user_id, movie_id))
    movies = {}
    for index in np.unique(movie_id, return_index=True)[1]:
        names = clean_genres(genre_names[genre] for genre in genres[index] if genre >= 0)
        movies[int(movie_id[index])] = Movie(titles[index].decode("utf-8"), names)
    return Tables(_TFDS_NAME, user_id, movie_id, rating, timestamp, movies)


def _dataset(source: str, tables: Tables) -> ViewDataset:
    user_ids, users = _number(tables.user_id)
    movie_ids, movies = _number(tables.movie_id)
    rated = [tables.movies[movie_id] for movie_id in movie_ids.tolist()]
    genre_names = tuple(sorted({genre for movie in rated for genre in movie.genres}))
    genres = [[name in movie.genres for name in genre_names] for movie in rated]
    return ViewDataset(
        source=source,
        name=tables.name,
        users=users,
        movies=movies,
        rating=tables.rating.astype(np.float32),
        timestamp=tables.timestamp.astype(np.int64),
        user_ids=user_ids,
        movie_ids=movie_ids,
        titles=tuple(movie.title for movie in rated),
        genres=np.array(genres, bool).reshape(len(rated), len(genre_names)),
        genre_names=genre_names,
        num_unrated=None if source == "tfds" else len(tables.movies) - len(rated),
    )


def _number(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ids in order of first appearance.

    Args:
      ids: int64 `[num_views]`.

    Returns:
      The different ids by number, int64, and each view's number, int32 `[num_views]`.
    """
    values, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order))
    return values[order], number[inverse.reshape(-1)]
