"""Reads the archives that MovieLens is published in, zipped or unpacked.

Three formats, told apart by the names of their files:

  ml-1m            ratings.dat and movies.dat, fields separated by '::', latin-1
  ml-100k          u.data separated by tabs, u.item by '|' with a 0 or 1 a genre, u.genre, latin-1
  ml-latest-small  ratings.csv and movies.csv with header lines, quoted titles, UTF-8

Source: the README in each archive, https://grouplens.org/datasets/movielens, and F. M. Harper and
J. A. Konstan, "The MovieLens Datasets: History and Context", ACM Transactions on Interactive
Intelligent Systems 5(4), 2015, doi:10.1145/2827872.
"""

import array
import csv
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from helpers.data.errors import DataError

# A format is told by any of its files, so that a missing one can be named.
_FORMATS = {
    "dat": {"ratings.dat", "movies.dat"},
    "100k": {"u.data", "u.item", "u.genre"},
    "csv": {"ratings.csv", "movies.csv"},
}
_KNOWN_FILES = set().union(*_FORMATS.values())
_RATINGS_HEADER = "userId,movieId,rating,timestamp"
_MOVIES_HEADER = "movieId,title,genres"
# ml-1m spells this genre in its own way; TFDS takes the other spelling for all.
_SPELLINGS = {"Children's": "Children"}
_NO_GENRE = {"", "unknown", "(no genres listed)"}
# A file that was cut at the end of a line looks whole, and only its length tells. ml-latest-small
# is not here: its publisher says that it changes.
_PUBLISHED_RATINGS = {"ml-1m": 1_000_209, "ml-100k": 100_000}
_UNFINISHED = (".part", ".partial", ".crdownload", ".download")
_SHOWN_LENGTH = 60


class Movie(NamedTuple):
    """A movie as its file has it; it may have several genres or none."""

    title: str
    genres: tuple[str, ...]


class Tables(NamedTuple):
    """The content of an archive.

    Attributes:
      name: Name of the data set, which is that of its folder.
      user_id: int64 `[num_views]`, in the order of the file.
      movie_id: int64 `[num_views]`.
      rating: float32 `[num_views]`, stars.
      timestamp: int64 `[num_views]`, seconds since 1970.
      movies: Every movie of the movies file by its id.
    """

    name: str
    user_id: np.ndarray
    movie_id: np.ndarray
    rating: np.ndarray
    timestamp: np.ndarray
    movies: dict[int, Movie]


def read_archive(place: Path) -> Tables:
    """Finds the archive in a folder and reads it.

    Args:
      place: A zip file; an unpacked archive; or a folder with one or the other in it, under a name
        that starts with 'ml-'.

    Returns:
      The tables. Where a data set is there zipped and unpacked, both are read and must agree.

    Raises:
      DataError: There is no archive, more than one, or it is damaged.
    """
    archives = _find(place)
    if not archives:
        raise DataError(_nothing_found(place))
    names = sorted({archive.name for archive in archives})
    if len(names) > 1:
        raise DataError(
            f"{place} holds more than one data set ({', '.join(names)}); pass the one that you "
            f"mean, as in data_dir={str(archives[0].path)!r}"
        )
    first, *others = (_read(archive) for archive in archives)
    if not all(_same(first, other) for other in others):
        paths = " and ".join(str(archive.path) for archive in archives)
        raise DataError(f"{paths} differ in content; keep one of them")
    return first


def clean_genres(names: Iterator[str]) -> tuple[str, ...]:
    """Spells genres in one way and drops what stands for having none, in any spelling.

    Args:
      names: Genres of a movie as a source has them.

    Returns:
      Different genres in the order given; empty if the movie has none.
    """
    kept = (_SPELLINGS.get(name, name) for name in names if name.lower() not in _NO_GENRE)
    return tuple(dict.fromkeys(kept))


class _Archive(NamedTuple):
    """Files that belong together: those of a folder, or of one folder in a zip file.

    Attributes:
      path: The folder or the zip file.
      name: Name of the data set.
      members: Path of each known file, inside of a zip file or on disk.
    """

    path: Path
    name: str
    members: dict[str, str]


class _File(NamedTuple):
    """A file's content, and the place that an error names."""

    name: str
    path: Path
    content: bytes

    def error(self, what: str) -> DataError:
        """Makes an error about this file."""
        return DataError(
            f"{self.name}{what}; delete {self.path} and copy it from the official archive again"
        )

    def malformed(self, number: int, line: str | bytes, expected: str) -> DataError:
        """Makes an error about a line that does not have the format."""
        shown = line.decode("latin-1") if isinstance(line, bytes) else line
        if len(shown) > _SHOWN_LENGTH:
            shown = shown[: _SHOWN_LENGTH - 1] + "…"
        return self.error(f" line {number} is malformed: {shown!r}, expected {expected}")


def _find(place: Path, is_top: bool = True) -> list[_Archive]:
    """Finds the archives in a place; below the top, only in what an unpacker nests."""
    if place.is_file():
        return _archives_of_zip(place)
    try:
        entries = sorted(place.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"cannot list {place}: {error.strerror}; pass a data_dir that can be read"
        ) from error
    files = {path.name: str(path) for path in entries if path.name in _KNOWN_FILES}
    found = [_Archive(place, _name(place.name), files)] if files else []
    for path in entries:
        if not path.name.lower().startswith("ml-"):
            continue
        if path.is_dir():
            nested = _find(path, is_top=False) if is_top else _find_loose(path)
            found.extend(nested)
        elif path.suffix.lower() == ".zip":
            found.extend(_archives_of_zip(path))
    return found


def _find_loose(place: Path) -> list[_Archive]:
    files = {name: str(place / name) for name in _KNOWN_FILES if (place / name).is_file()}
    return [_Archive(place, _name(place.name), files)] if files else []


def _name(folder: str) -> str:
    """Names a data set by its folder, unless files were taken out of theirs."""
    return folder if folder.lower().startswith("ml-") else "MovieLens"


def _archives_of_zip(path: Path) -> list[_Archive]:
    by_folder = {}
    for member in _in_zip(path, zipfile.ZipFile.namelist):
        inside = PurePosixPath(member)
        if inside.name in _KNOWN_FILES:
            by_folder.setdefault(inside.parent, {})[inside.name] = member
    if not by_folder:
        raise DataError(
            f"{path} holds none of the files of MovieLens ({', '.join(sorted(_KNOWN_FILES))}); "
            "move it away, or copy the official archive again"
        )
    return [
        _Archive(path, _name(folder.name or path.stem), members)
        for folder, members in by_folder.items()
    ]


def _in_zip(path: Path, action):
    """Does something with a zip file, and tells what can be wrong with one."""
    try:
        with zipfile.ZipFile(path) as file:
            return action(file)
    # RuntimeError is a password, NotImplementedError a compression that Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.strerror:
            message = f"cannot read {path}: {error.strerror}; check its permissions"
        else:
            message = (
                f"{path} is a damaged or truncated zip file, or none ({error}); delete it and "
                "download the official archive again"
            )
        raise DataError(message) from error


def _nothing_found(place: Path) -> str:
    try:
        names = sorted(path.name for path in place.iterdir())
    except OSError:
        names = []
    unfinished = [
        name for name in names if name.startswith("ml-") and name.lower().endswith(_UNFINISHED)
    ]
    hint = f"; {unfinished[0]} is an unfinished download" if unfinished else ""
    return (
        f"no MovieLens archive is in {place}{hint}; put ml-1m.zip, ml-100k.zip or "
        "ml-latest-small.zip there, unpacked or not, or use source='bundled'"
    )


def _load(archive: _Archive, name: str) -> _File:
    """Reads a file that has to be there."""
    if name not in archive.members:
        raise DataError(
            f"{name} is not in {archive.path}, only {', '.join(sorted(archive.members))}; copy all "
            "files of the official archive"
        )
    member = archive.members[name]
    if archive.path.is_file():
        content = _in_zip(archive.path, lambda file: file.read(member))
    else:
        try:
            content = Path(member).read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read {member}: {error.strerror}; check its permissions"
            ) from error
    return _File(name, archive.path if archive.path.is_file() else Path(member), content)


def _read(archive: _Archive) -> Tables:
    """Reads an archive of any format."""
    formats = [form for form, names in _FORMATS.items() if names & archive.members.keys()]
    if len(formats) > 1:
        raise DataError(
            f"{archive.path} holds files of more than one format "
            f"({', '.join(sorted(archive.members))}); keep those of one archive"
        )
    if formats == ["dat"]:
        ratings_file, movies_file = _load(archive, "ratings.dat"), _load(archive, "movies.dat")
        ratings, first = _ratings(ratings_file, "::"), 1
        rows = _movies_dat(movies_file)
    elif formats == ["100k"]:
        ratings_file, movies_file = _load(archive, "u.data"), _load(archive, "u.item")
        ratings, first = _ratings(ratings_file, "\t"), 1
        rows = _movies_100k(movies_file, _genres_100k(_load(archive, "u.genre")))
    else:
        ratings_file, movies_file = _load(archive, "ratings.csv"), _load(archive, "movies.csv")
        ratings, first = _ratings(ratings_file, ",", _RATINGS_HEADER), 2
        rows = _movies_csv(movies_file)
    wanted = _PUBLISHED_RATINGS.get(archive.name)
    if wanted is not None and len(ratings[0]) != wanted:
        raise ratings_file.error(
            f" holds {len(ratings[0]):,} ratings, that of {archive.name} has {wanted:,}"
        )
    movies = {}
    for number, movie_id, movie in rows:
        if movie_id in movies:
            raise movies_file.error(f" line {number}: movie {movie_id} is there a second time")
        movies[movie_id] = movie
    unknown = np.flatnonzero(~np.isin(ratings[1], np.fromiter(movies, np.int64, len(movies))))
    if len(unknown):
        raise DataError(
            f"{ratings_file.name} line {unknown[0] + first}: movie {ratings[1][unknown[0]]} is not "
            f"in {movies_file.name} of {archive.path}; the files are not of one archive, or one is "
            "cut: copy both from the same place again"
        )
    return Tables(archive.name, *ratings, movies)


def _lines(file: _File) -> list[bytes]:
    """Splits a file at line feeds only: in latin-1, other bytes are line breaks to Python."""
    if not file.content:
        raise file.error(" is empty")
    if not file.content.endswith(b"\n"):
        # All files are published with a last line feed. Without this check, a timestamp that was
        # cut would pass for a shorter one.
        raise file.error(" is truncated: its last line has no line feed")
    return file.content.replace(b"\r\n", b"\n").split(b"\n")[:-1]


def _ratings(file: _File, separator: str, header: str | None = None) -> tuple[np.ndarray, ...]:
    """Reads user, movie, rating and timestamp of each line."""
    lines = _lines(file)
    if header is not None:
        _check_header(file, lines[0], header)
    between = re.escape(separator).encode()
    line_format = re.compile(
        between.join([rb"(\d{1,18})", rb"(\d{1,18})", rb"([0-5](?:\.\d)?)", rb"(\d{1,18})"])
    )
    users, movies, ratings, timestamps = (array.array(code) for code in "qqfq")
    for number in range(header is not None, len(lines)):
        match = line_format.fullmatch(lines[number])
        if match is None:
            expected = f"user, movie, 0 to 5 stars and timestamp, separated by {separator!r}"
            raise file.malformed(number + 1, lines[number], expected)
        user, movie, rating, timestamp = match.groups()
        users.append(int(user))
        movies.append(int(movie))
        ratings.append(float(rating))
        timestamps.append(int(timestamp))
    if not users:
        raise file.error(" holds no ratings")
    return (
        np.array(users, np.int64),
        np.array(movies, np.int64),
        np.array(ratings, np.float32),
        np.array(timestamps, np.int64),
    )


def _check_header(file: _File, line: bytes, expected: str) -> None:
    # Spreadsheet programs put a byte order mark before it.
    if line.removeprefix(b"\xef\xbb\xbf") != expected.encode():
        raise file.malformed(1, line, f"the header {expected}")


def _check_latin_1(file: _File) -> None:
    """Refuses a file that was converted on its way: every byte is a character of latin-1."""
    try:
        text = file.content.decode("utf-8")
    except UnicodeDecodeError:
        return
    if not text.isascii():
        lines = enumerate(file.content.split(b"\n"), 1)
        number = next(number for number, line in lines if not line.isascii())
        raise file.error(f" line {number} is UTF-8, expected latin-1 as it is published")


def _movies_dat(file: _File) -> Iterator[tuple[int, int, Movie]]:
    """Yields line number, id and movie."""
    _check_latin_1(file)
    for number, line in enumerate(_lines(file), 1):
        # A title may hold '::' itself, so that it reaches to the last one.
        match = re.fullmatch(r"([0-9]{1,18})::(.+)::(.*)", line.decode("latin-1"), re.DOTALL)
        if match is None:
            raise file.malformed(number, line, "id, title and genres, separated by '::'")
        movie_id, title, genres = match.groups()
        yield number, int(movie_id), Movie(title, clean_genres(genres.split("|")))


def _genres_100k(file: _File) -> list[str]:
    """Reads the names of the genre flags, in their order."""
    names = []
    for number, line in enumerate(_lines(file), 1):
        if not line:  # The published file ends in an empty line.
            continue
        name, _, index = line.decode("latin-1").rpartition("|")
        if not name or index != str(len(names)):
            raise file.malformed(number, line, f"a genre, '|' and {len(names)}")
        names.append(name)
    return names


def _movies_100k(file: _File, genre_names: list[str]) -> Iterator[tuple[int, int, Movie]]:
    """Yields line number, id and movie."""
    _check_latin_1(file)
    line_format = re.compile(
        rf"([0-9]{{1,18}})\|([^|]+)\|[^|]*\|[^|]*\|[^|]*((?:\|[01]){{{len(genre_names)}}})"
    )
    for number, line in enumerate(_lines(file), 1):
        match = line_format.fullmatch(line.decode("latin-1"))
        if match is None:
            raise file.malformed(
                number,
                line,
                f"id, title, two dates, address and {len(genre_names)} flags of 0 or 1, separated "
                "by '|'",
            )
        movie_id, title, flags = match.groups()
        chosen = [n for n, flag in zip(genre_names, flags[1:].split("|")) if flag == "1"]
        yield number, int(movie_id), Movie(title, clean_genres(chosen))


def _movies_csv(file: _File) -> Iterator[tuple[int, int, Movie]]:
    """Yields line number, id and movie."""
    lines = _lines(file)
    _check_header(file, lines[0], _MOVIES_HEADER)
    try:
        text = file.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = file.content.count(b"\n", 0, error.start) + 1
        raise file.error(
            f" line {number} is not UTF-8 (byte 0x{file.content[error.start]:02x}), as it is "
            "published"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    next(reader)
    expected = "id, title (quoted if it holds a comma) and genres, separated by ','"
    while True:
        number = reader.line_num + 1  # Where the row starts; a quote left open runs on.
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            line = lines[number - 1].decode("utf-8")
            raise file.malformed(number, line, f"{expected} ({error})") from error
        if len(row) != 3 or not re.fullmatch(r"[0-9]{1,18}", row[0]) or not row[1]:
            raise file.malformed(number, lines[number - 1].decode("utf-8"), expected)
        yield number, int(row[0]), Movie(row[1], clean_genres(row[2].split("|")))


def _same(first: Tables, second: Tables) -> bool:
    arrays = zip(first[1:5], second[1:5])
    return first.movies == second.movies and all(np.array_equal(a, b) for a, b in arrays)
