"""Loading views: each format with its quirks against hand counts, and what can be wrong with it."""

import dataclasses
import importlib.util
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers import data
from helpers.data import movielens, movielens_files

ROOT = Path(__file__).resolve().parents[2]

# Three users and, of four movies, three that were rated; ids have gaps; user 9 rated 20 twice.
# Movie 7 has no genre, movie 31 nobody rated, titles hold commas, separators of others and accents.
FILES = {
    "ml-1m": {
        "ratings.dat": "9::20::4::100\n2::7::5::200\n9::33::3::101\n9::20::1::500\n5::20::2::7\n",
        "movies.dat": (
            "7::Quiet, The (1990)::\n20::Café: Zéro (1991)::Children's|Drama\n"
            "31::Nobody's (1992)::Horror\n33::A|B (1993)::Drama\n"
        ),
    },
    "ml-100k": {
        "u.data": "9\t20\t4\t100\n2\t7\t5\t200\n9\t33\t3\t101\n9\t20\t1\t500\n5\t20\t2\t7\n",
        "u.genre": "unknown|0\nChildren's|1\nDrama|2\nHorror|3\n\n",
        "u.item": (
            "7|Quiet, The (1990)|01-Jan-1990||http://x|1|0|0|0\n"
            "20|Café: Zéro (1991)|01-Jan-1991||http://x|0|1|1|0\n"
            "31|Nobody's (1992)|01-Jan-1992|||0|0|0|1\n"
            "33|A::B (1993)||||0|0|1|0\n"
        ),
    },
    "ml-latest-small": {
        "ratings.csv": (
            "userId,movieId,rating,timestamp\n9,20,4.0,100\n2,7,5.0,200\n9,33,3.5,101\n"
            "9,20,1.0,500\n5,20,2.0,7\n"
        ),
        "movies.csv": (
            'movieId,title,genres\n7,"Quiet, The (1990)",(no genres listed)\n'
            '20,Café: Zéro (1991),Children|Drama\n31,"Nobody\'s (1992)",Horror\n'
            '33,"A ""B"", C (1993)",Drama\n'
        ),
    },
}
LAST_TITLE = {"ml-1m": "A|B (1993)", "ml-100k": "A::B (1993)", "ml-latest-small": 'A "B", C (1993)'}


@pytest.fixture(autouse=True)
def small_archives(monkeypatch):
    """The archives here are smaller than the published ones."""
    monkeypatch.setattr(movielens_files, "_PUBLISHED_RATINGS", {})


def encode(name, files):
    encoding = "utf-8" if name == "ml-latest-small" else "latin-1"
    return {file: text.encode(encoding) for file, text in files.items()}


def put(folder, name, zipped, **changes):
    """Writes an archive into a folder; a change of a file is bytes, or None to leave it out."""
    files = encode(name, FILES[name]) | {key.replace("_", "."): v for key, v in changes.items()}
    files = {file: content for file, content in files.items() if content is not None}
    if zipped:
        with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
            for file, content in files.items():
                archive.writestr(f"{name}/{file}", content)
        return folder / f"{name}.zip"
    (folder / name).mkdir()
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder / name


def refusal(folder, source="archive"):
    with pytest.raises(data.DataError) as caught:
        data.load_movielens(source, data_dir=folder)
    return str(caught.value)


# --- the three formats


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_archive_equals_hand_counts(tmp_path, name, zipped):
    put(tmp_path, name, zipped)
    found = data.load_movielens("archive", data_dir=tmp_path)
    assert found.source == "archive"
    assert found.shape == (3, 3)
    assert found.user_ids.tolist() == [9, 2, 5]
    assert found.movie_ids.tolist() == [20, 7, 33]
    assert found.users.tolist() == [0, 1, 0, 0, 2]
    assert found.movies.tolist() == [0, 1, 2, 0, 0]
    assert found.titles == ("Café: Zéro (1991)", "Quiet, The (1990)", LAST_TITLE[name])
    assert found.genre_names == ("Children", "Drama")
    assert found.genres.tolist() == [[True, True], [False, False], [False, True]]
    stars = [4, 5, 3.5 if name == "ml-latest-small" else 3, 1, 2]
    assert found.rating.tolist() == stars
    assert found.timestamp.tolist() == [100, 200, 101, 500, 7]


def test_watch_matrix_counts_a_repeated_rating_once(tmp_path):
    put(tmp_path, "ml-1m", False)
    found = data.load_movielens("archive", data_dir=tmp_path)
    assert found.watch_matrix().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert found.watch_matrix().dtype == np.uint8
    assert found.views_per_user.tolist() == [2, 1, 1]
    assert found.density == pytest.approx(4 / 9)
    assert found.num_views == 5
    assert found.num_unrated == 1


def test_checksum_is_that_of_the_content(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for folder in folders:
        folder.mkdir()
    put(folders[0], "ml-1m", False)
    put(folders[1], "ml-1m", True)
    text = FILES["ml-1m"]["movies.dat"].replace("Drama\n", "Comedy\n")
    put(folders[2], "ml-1m", False, movies_dat=text.encode("latin-1"))
    sums = [data.load_movielens("archive", data_dir=folder).checksum for folder in folders]
    assert sums[0] == sums[1] != sums[2]


def test_windows_line_ends_are_read(tmp_path):
    files = {
        name: text.replace("\n", "\r\n").encode("latin-1") for name, text in FILES["ml-1m"].items()
    }
    put(tmp_path, "ml-1m", False, ratings_dat=files["ratings.dat"], movies_dat=files["movies.dat"])
    assert data.load_movielens("archive", data_dir=tmp_path).titles[1] == "Quiet, The (1990)"


@pytest.mark.parametrize("zipped", [False, True])
def test_data_dir_may_be_the_archive_itself(tmp_path, zipped):
    path = put(tmp_path, "ml-100k", zipped)
    assert data.load_movielens("archive", data_dir=path).shape == (3, 3)


def test_zip_without_a_folder_in_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-mine.zip", "w") as archive:
        for file, content in encode("ml-1m", FILES["ml-1m"]).items():
            archive.writestr(file, content)
    assert data.load_movielens("archive", data_dir=tmp_path).shape == (3, 3)


def test_archive_that_is_there_zipped_and_unpacked_is_read_if_both_agree(tmp_path):
    put(tmp_path, "ml-1m", True)
    folder = put(tmp_path, "ml-1m", False)
    assert data.load_movielens("archive", data_dir=tmp_path).shape == (3, 3)
    (folder / "ratings.dat").write_bytes(b"9::20::5::100\n")
    assert "differ in content; keep one of them" in refusal(tmp_path)


# --- what can be wrong


def test_missing_archive_is_named(tmp_path):
    message = refusal(tmp_path)
    assert "no MovieLens archive is in" in message
    assert "source='bundled'" in message


def test_several_archives_are_not_chosen_from(tmp_path):
    put(tmp_path, "ml-1m", True)
    put(tmp_path, "ml-100k", False)
    message = refusal(tmp_path)
    assert "ml-100k, ml-1m" in message
    assert "data_dir=" in message


@pytest.mark.parametrize("name", FILES)
def test_missing_movies_file_is_named(tmp_path, name):
    movies = list(FILES[name])[-1]
    put(tmp_path, name, False, **{movies.replace(".", "_"): None})
    assert f"{movies} is not in {tmp_path / name}, only" in refusal(tmp_path)


def test_unfinished_download_is_named(tmp_path):
    (tmp_path / "ml-1m.zip.crdownload").touch()
    assert "ml-1m.zip.crdownload is an unfinished download" in refusal(tmp_path)


def test_zip_of_other_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("README", "")
    assert "holds none of the files of MovieLens" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 10, 200])
def test_truncated_zip_is_refused(tmp_path, length):
    path = put(tmp_path, "ml-1m", True)
    path.write_bytes(path.read_bytes()[:length])
    assert "ml-1m.zip is a damaged or truncated zip file" in refusal(tmp_path)


def test_zip_with_changed_bytes_is_refused(tmp_path):
    path = put(tmp_path, "ml-1m", True)
    content = path.read_bytes()
    assert b"9::20::4" in content
    path.write_bytes(content.replace(b"9::20::4", b"9::20::5"))
    assert "damaged or truncated zip file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "text", "line"),
    [
        ("ml-1m", "ratings.dat", "9::20::4::100\n2::7::5\n", "ratings.dat line 2"),
        ("ml-1m", "ratings.dat", "9::20::4::100\n2::x::5::1\n", "ratings.dat line 2"),
        ("ml-1m", "ratings.dat", "9::20::7::100\n", "ratings.dat line 1"),
        ("ml-1m", "movies.dat", "7::Quiet\n", "movies.dat line 1"),
        ("ml-100k", "u.data", "9 20 4 100\n", "u.data line 1"),
        ("ml-100k", "u.item", "7|Quiet|||x|1|0|0\n", "u.item line 1"),
        (
            "ml-latest-small",
            "ratings.csv",
            "userId,movieId,rating,timestamp\n9,20,4.0\n",
            "ratings.csv line 2",
        ),
        (
            "ml-latest-small",
            "movies.csv",
            'movieId,title,genres\n7,"A (1990),Drama\n',
            "movies.csv line 2",
        ),
    ],
)
def test_malformed_line_is_named(tmp_path, name, file, text, line):
    put(tmp_path, name, False, **{file.replace(".", "_"): text.encode()})
    assert line in refusal(tmp_path)


def test_csv_of_another_encoding_is_refused(tmp_path):
    movies = FILES["ml-latest-small"]["movies.csv"].encode("latin-1")
    put(tmp_path, "ml-latest-small", False, movies_csv=movies)
    assert "movies.csv line 3 is not UTF-8" in refusal(tmp_path)


@pytest.mark.parametrize(("name", "file"), [("ml-1m", "movies.dat"), ("ml-100k", "u.item")])
def test_latin_1_that_was_converted_on_its_way_is_refused(tmp_path, name, file):
    put(tmp_path, name, False, **{file.replace(".", "_"): FILES[name][file].encode()})
    assert f"{file} line 2 is UTF-8, expected latin-1" in refusal(tmp_path)


def test_header_of_other_columns_is_refused(tmp_path):
    put(tmp_path, "ml-latest-small", False, movies_csv=b"id,title,genres\n7,A,Drama\n")
    assert "movies.csv line 1 is malformed: 'id,title,genres'" in refusal(tmp_path)


def test_file_that_was_cut_within_a_line_is_refused(tmp_path):
    put(tmp_path, "ml-1m", False, ratings_dat=b"9::20::4::100\n2::7::5::20")
    assert "ratings.dat is truncated: its last line has no line feed" in refusal(tmp_path)


def test_movie_that_is_there_twice_is_refused(tmp_path):
    movies = FILES["ml-1m"]["movies.dat"] + "7::Quiet::Drama\n"
    put(tmp_path, "ml-1m", False, movies_dat=movies.encode("latin-1"))
    assert "movies.dat line 5: movie 7 is there a second time" in refusal(tmp_path)


def test_rating_of_an_unknown_movie_is_refused(tmp_path):
    put(tmp_path, "ml-1m", False, movies_dat=b"7::Quiet::Drama\n33::A::Drama\n")
    assert "ratings.dat line 1: movie 20 is not in movies.dat" in refusal(tmp_path)


def test_archive_without_ratings_is_refused(tmp_path):
    put(tmp_path, "ml-1m", False, ratings_dat=b"")
    assert "ratings.dat is empty" in refusal(tmp_path)


def test_published_archive_that_was_cut_at_the_end_of_a_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(movielens_files, "_PUBLISHED_RATINGS", {"ml-1m": 6})
    put(tmp_path, "ml-1m", True)
    assert "ratings.dat holds 5 ratings, that of ml-1m has 6" in refusal(tmp_path)


def test_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source must be one of 'bundled', 'archive', 'tfds'"):
        data.load_movielens("ml-1m")


# --- bundled


@pytest.fixture(scope="module")
def bundled():
    return data.load_movielens()


def test_bundled_views_are_of_the_stated_kind(bundled):
    assert bundled.num_users == 600
    assert 390 <= bundled.num_movies <= 400
    views = bundled.views_per_user
    assert views.min() == 1
    assert views.max() > bundled.num_movies / 2
    # Long tails: most views are by the more active half of the users, and of that of the movies.
    assert np.sort(views)[300:].sum() > 0.75 * views.sum()
    popularity = np.sort(bundled.watch_matrix().sum(0))
    assert popularity[200:].sum() > 0.75 * popularity.sum()
    assert len(bundled.users) > views.sum()  # some are repeated
    assert set(np.unique(bundled.genres.sum(1))) == {0, 1, 2, 3}
    assert (np.diff(np.sort(bundled.movie_ids)) > 1).any()
    assert len(set(bundled.titles)) == bundled.num_movies
    assert set(np.unique(bundled.rating)) == {1, 2, 3, 4, 5}


def test_bundled_file_is_what_its_script_makes():
    spec = importlib.util.spec_from_file_location(
        "make_synthetic_movies", ROOT / "data" / "make_synthetic_movies.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with zipfile.ZipFile(movielens.BUNDLED) as archive:
        stored = {name: archive.read(name).decode() for name in archive.namelist()}
    assert script.make_files() == stored


def test_description_says_what_was_loaded(bundled):
    first, second = str(bundled).splitlines()
    assert first.startswith("synthetic from bundled: 600 users x ")
    assert bundled.checksum[:12] in first
    assert second.startswith("movies a user watched: 1 to 240, median ")


# --- TFDS


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder in which TFDS' own builder has prepared MovieLens from the ml-1m files above."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="lane B has no TFDS")
    files = FILES["ml-1m"] | {"users.dat": "".join(f"{u}::F::25::4::1\n" for u in (2, 5, 9))}
    # TFDS' parser takes a movie without genres for one with the genre '', which it does not know.
    files["movies.dat"] = files["movies.dat"].replace("(1990)::\n", "(1990)::(no genres listed)\n")
    served = tmp_path / "served" / "ml-1m"
    served.mkdir(parents=True)
    for name, content in encode("ml-1m", files).items():
        (served / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tfds.download.DownloadManager, "download_and_extract", lambda *_: served.parent
        )
        data.load_movielens("tfds", data_dir=tmp_path / "tfds")
    return tmp_path / "tfds"


def test_tfds_gives_what_the_archive_holds(prepared, monkeypatch):
    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)  # What is on disk needs none.
    found = data.load_movielens("tfds", data_dir=prepared)
    assert found.source == "tfds"
    rows = {
        (
            int(found.user_ids[user]),
            found.titles[movie],
            tuple(np.array(found.genre_names)[found.genres[movie]]),
            float(stars),
            int(time),
        )
        for user, movie, stars, time in zip(
            found.users, found.movies, found.rating, found.timestamp
        )
    }
    assert rows == {
        (9, "Café: Zéro (1991)", ("Children", "Drama"), 4, 100),
        (2, "Quiet, The (1990)", (), 5, 200),
        (9, "A|B (1993)", ("Drama",), 3, 101),
        (9, "Café: Zéro (1991)", ("Children", "Drama"), 1, 500),
        (5, "Café: Zéro (1991)", ("Children", "Drama"), 2, 7),
    }


def test_without_a_network_tfds_says_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="lane B has no TFDS")

    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    message = refusal(tmp_path, "tfds")
    assert "movielens/1m-ratings could not be downloaded" in message
    assert "source='archive'" in message


# --- held-out views


def test_held_out_views_are_the_stated_share_of_each_user(bundled):
    train, held_out = data.split_views(bundled, fraction=0.2, seed=0)
    views = bundled.views_per_user
    np.testing.assert_array_equal(train + held_out, bundled.watch_matrix())
    np.testing.assert_array_equal(held_out.sum(1), np.minimum(np.rint(0.2 * views), views - 1))
    assert (train.sum(1) >= 1).all()
    assert (views == 1).any()


def test_held_out_views_are_random_and_depend_on_the_seed(bundled):
    _, first = data.split_views(bundled, fraction=0.4, seed=0)
    _, again = data.split_views(bundled, fraction=0.4, seed=0)
    _, other = data.split_views(bundled, fraction=0.4, seed=1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    # Of popular movies, each loses about the same share.
    popular = np.argsort(-bundled.watch_matrix().sum(0))[:20]
    shares = first[:, popular].sum(0) / bundled.watch_matrix()[:, popular].sum(0)
    np.testing.assert_allclose(shares, 0.4, atol=0.12)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 20])
def test_a_fraction_that_is_none_is_refused(bundled, fraction):
    with pytest.raises(ValueError, match="fraction must be above 0 and below 1"):
        data.split_views(bundled, fraction=fraction, seed=0)


def test_views_cannot_be_changed(bundled):
    with pytest.raises(dataclasses.FrozenInstanceError):
        bundled.source = "tfds"
