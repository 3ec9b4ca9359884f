"""Loading digits: each source, and everything that can be wrong with files and networks."""

import contextlib
import errno
import gzip
import importlib.util
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import data
from helpers.data import mnist

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "mnist"
NAMES = {
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 3,
    "t10k-images-idx3-ubyte": 2,
    "t10k-labels-idx1-ubyte": 2,
}


def idx(array: np.ndarray) -> bytes:
    """Encodes bytes as an idx file."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def content(name: str, count: int) -> np.ndarray:
    """What the archive fixture puts into a file."""
    if "images" in name:
        return np.arange(count * 6).reshape(count, 2, 3)
    return np.arange(count) + 7


@pytest.fixture
def archive(tmp_path):
    """A folder with the four files, tiny; two of them gzipped."""
    for name, count in NAMES.items():
        encoded = idx(content(name, count))
        if "labels" in name:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(encoded))
        else:
            (tmp_path / name).write_bytes(encoded)
    return tmp_path


def refuse(*_, **__):
    """Stands for every way to a network."""
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


TFDS_IMAGES = np.random.default_rng(0).integers(0, 256, (7, 28, 28))
TFDS_LABELS = np.array([3, 1, 4, 1, 5, 9, 2])


@contextlib.contextmanager
def downloads_are(folder):
    """Serves five training and two test examples to TFDS' own MNIST builder, by files in `folder`.

    The rest of the network is off.
    """
    from tensorflow_datasets.core.download import DownloadManager
    from tensorflow_datasets.image_classification import mnist as builder

    parts = {"train": slice(0, 5), "t10k": slice(5, 7)}
    for prefix, part in parts.items():
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(TFDS_IMAGES[part]))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(TFDS_LABELS[part]))

    def serve(_, urls):
        return {key: folder / Path(url).name.removesuffix(".gz") for key, url in urls.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_TRAIN_EXAMPLES", 5)
        patch.setattr(builder, "_TEST_EXAMPLES", 2)
        patch.setattr(DownloadManager, "download_and_extract", serve)
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


needs_tfds = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_datasets") is None, reason="lane B has no TFDS"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of TFDS data sets with MNIST in it; read it, do not change it."""
    pytest.importorskip("tensorflow_datasets", reason="lane B has no TFDS")
    folder = tmp_path_factory.mktemp("prepared")
    with downloads_are(tmp_path_factory.mktemp("served")):
        data.load_mnist("tfds", data_dir=folder)
    return folder


def tree(folder):
    """Paths of the files below a folder, and of empty folders."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    )


def test_bundled_digits_are_the_uci_digits():
    digits = data.load_mnist()
    assert digits.source == "bundled"
    assert (len(digits.train_labels), len(digits.test_labels)) == (1442, 355)
    assert digits.image_shape == (8, 8)
    assert digits.dtype == np.uint8
    assert digits.train_images.max() == digits.pixel_max == 16
    # 178 to 183 images a digit in all; every fifth of each tests.
    assert digits.class_counts["test"].tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]


def test_bundled_digits_are_the_same_everywhere():
    # The digits and the split are fixed, so the checksum is: of another one, every result differs.
    assert data.load_mnist().checksum[:12] == "c22be76c8b0b"


def test_the_description_says_what_was_used():
    text = str(data.load_mnist())
    assert "digits from bundled: 1442 training and 355 test images, 8 x 8, uint8" in text


def test_archive_reads_all_four_files(archive):
    digits = data.load_mnist("archive", data_dir=archive)
    np.testing.assert_array_equal(
        digits.train_images, content("train-images-idx3-ubyte", 3).astype(np.uint8)
    )
    assert digits.train_labels.tolist() == [7, 8, 9]
    assert digits.test_labels.tolist() == [7, 8]
    assert digits.train_labels.dtype == np.int32
    assert digits.pixel_max == 255


def test_the_checksum_is_of_the_content_and_not_of_the_files(archive):
    before = data.load_mnist("archive", data_dir=archive).checksum
    name = "train-images-idx3-ubyte"
    (archive / f"{name}.gz").write_bytes(gzip.compress((archive / name).read_bytes(), 1))
    (archive / name).unlink()
    assert data.load_mnist("archive", data_dir=archive).checksum == before


def test_the_spelling_with_a_dot_is_found(archive):
    (archive / "t10k-images-idx3-ubyte").rename(archive / "t10k-images.idx3-ubyte")
    assert len(data.load_mnist("archive", data_dir=archive).test_images) == 2


def test_one_split_needs_its_own_files_only(archive):
    (archive / "train-images-idx3-ubyte").unlink()
    digits = data.load_mnist("archive", data_dir=archive, splits=("test",))
    assert (len(digits.train_images), len(digits.test_images)) == (0, 2)


def damage(archive, name, change):
    """Rewrites a file of the archive."""
    path = next(archive.glob(f"{name}*"))
    path.write_bytes(change(path.read_bytes()))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DAMAGE = {
    "missing": (lambda a: (a / IMAGES).unlink(), r"train-images-idx3-ubyte .* is not in"),
    "truncated": (lambda a: damage(a, IMAGES, lambda b: b[:-1]), r"truncated: .* 18 bytes.* 17"),
    "too long": (lambda a: damage(a, IMAGES, lambda b: b + b"x"), r"too long"),
    "header cut": (lambda a: damage(a, IMAGES, lambda b: b[:9]), r"truncated in its header"),
    "empty": (lambda a: damage(a, IMAGES, lambda b: b""), r"is not an idx file"),
    "a web page": (lambda a: damage(a, IMAGES, lambda b: b"<html>"), r"is not an idx file"),
    "other dtype": (
        lambda a: damage(a, IMAGES, lambda b: b[:2] + b"\x0d" + b[3:]),
        r"idx type 13, expected bytes",
    ),
    "gzip cut": (lambda a: damage(a, LABELS, lambda b: b[:-9]), r"damaged or truncated gzip"),
    "gzip corrupt": (
        lambda a: damage(a, LABELS, lambda b: b[:12] + bytes([b[12] ^ 255]) + b[13:]),
        r"damaged or truncated gzip",
    ),
    "labels for images": (
        lambda a: (a / IMAGES).write_bytes(idx(np.arange(3))),
        r"holds labels, expected images; .* may be swapped",
    ),
    "images for labels": (
        lambda a: (a / f"{LABELS}.gz").write_bytes(idx(np.zeros((3, 2, 3)))),
        r"holds images, expected labels; .* may be swapped",
    ),
    "other number": (
        lambda a: (a / f"{LABELS}.gz").write_bytes(idx(np.arange(2))),
        r"3 images and 2 labels",
    ),
    "other shape": (
        lambda a: (a / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((2, 2, 4)))),
        r"test images are 2 x 4, those of the other split 2 x 3",
    ),
    "header beyond 64 bits": (
        lambda a: damage(a, IMAGES, lambda b: b[:4] + bytes([128, 0, 0, 0] * 2 + [0, 0, 0, 4])),
        r"truncated: its header says 18446744073709551616 bytes",
    ),
    "a folder": (
        lambda a: ((a / IMAGES).unlink(), (a / IMAGES).mkdir()),
        r"cannot read .*train-images-idx3-ubyte: Is a directory",
    ),
    "labels out of range": (
        lambda a: (a / f"{LABELS}.gz").write_bytes(idx(np.array([1, 2, 11]))),
        r"labels run from 1 to 11, expected 0 to 9",
    ),
    "two that differ": (
        lambda a: (a / f"{IMAGES}.gz").write_bytes(gzip.compress(idx(np.zeros((3, 2, 3))))),
        r"differ in content; keep one",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_archive_says_what_is_wrong(archive, change, message):
    change(archive)
    with pytest.raises(data.DataError, match=message):
        data.load_mnist("archive", data_dir=archive)


@pytest.mark.parametrize(("method", "message"), [
    ("read_bytes", "cannot read .*Permission denied; check its permissions"),
    ("iterdir", "cannot list .*Permission denied; pass a data_dir that .* can be read"),
])  # fmt: skip
def test_missing_permission_is_told(archive, monkeypatch, method, message):
    def deny(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, method, deny)
    with pytest.raises(data.DataError, match=message):
        data.load_mnist("archive", data_dir=archive)


def test_two_copies_of_one_content_are_fine(archive):
    name = "train-images-idx3-ubyte"
    (archive / f"{name}.gz").write_bytes(gzip.compress((archive / name).read_bytes()))
    assert len(data.load_mnist("archive", data_dir=archive).train_images) == 3


def test_files_of_the_right_shape_that_are_not_mnist_are_refused(tmp_path):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((10000, 28, 28))))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(10000)))
    with pytest.raises(data.DataError, match="shape of MNIST but other content"):
        data.load_mnist("archive", data_dir=tmp_path, splits=("test",))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real MNIST test files are not here")
def test_the_real_test_images_are_known():
    digits = data.load_mnist("archive", data_dir=SHARED, splits=("test",))
    assert digits.test_images.shape == (10000, 28, 28)
    assert digits.class_counts["test"].tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
    ]  # fmt: skip


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real MNIST test files are not here")
def test_test_files_under_the_names_of_train_files_are_refused(archive):
    for name in (IMAGES, LABELS):
        for path in archive.glob(f"{name}*"):
            path.unlink()
        shutil.copy(SHARED / f"{name.replace('train', 't10k')}.gz", archive / f"{name}.gz")
    with pytest.raises(data.DataError, match="train and t10k files may be swapped"):
        data.load_mnist("archive", data_dir=archive, splits=("train",))


@pytest.mark.parametrize(("source", "splits", "message"), [
    ("mnist", ("test",), "source must be one of 'bundled', 'archive', 'tfds'"),
    ("bundled", ("validation",), "splits must name"), ("bundled", (), "splits must name"),
])  # fmt: skip
def test_unknown_names_are_refused(source, splits, message):
    with pytest.raises(ValueError, match=message):
        data.load_mnist(source, splits=splits)


def test_pixels_scale_to_one():
    got = data.to_float(np.array([0, 128, 255], np.uint8), 255)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [0, 128 / 255, 1])


def test_what_tfds_has_on_disk_is_read_without_a_network(prepared, no_network):
    digits = data.load_mnist("tfds", data_dir=prepared)
    # TFDS stores the examples in an order of its own.
    for images, labels, part in (
        (digits.train_images, digits.train_labels, slice(0, 5)),
        (digits.test_images, digits.test_labels, slice(5, 7)),
    ):
        got = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
        given = zip(TFDS_IMAGES[part].astype(np.uint8), TFDS_LABELS[part], strict=True)
        assert got == {image.tobytes(): label for image, label in given}
    assert (digits.image_shape, digits.dtype, digits.pixel_max) == ((28, 28), np.uint8, 255)


def test_tfds_gives_the_examples_in_the_same_order_every_time(prepared, no_network):
    first, second = (data.load_mnist("tfds", data_dir=prepared).checksum for _ in range(2))
    assert first == second


def test_preparing_by_tfds_leaves_the_data_set_only(prepared):
    folder = "mnist/3.0.1"
    assert tree(prepared) == [
        f"{folder}/dataset_info.json", f"{folder}/features.json",
        f"{folder}/mnist-test.tfrecord-00000-of-00001",
        f"{folder}/mnist-train.tfrecord-00000-of-00001",
    ]  # fmt: skip


@needs_tfds
def test_preparing_by_tfds_shows_progress_and_prints_nothing(tmp_path, capsys):
    (tmp_path / "served").mkdir()
    with downloads_are(tmp_path / "served"):
        data.load_mnist("tfds", data_dir=tmp_path / "tfds")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Generating splits" in printed.err


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def corrupt(path):
    content = bytearray(path.read_bytes())
    content[50] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(("pattern", "change"), [
    ("*train*", cut), ("*train*", corrupt), ("*train*", Path.unlink),
    ("features.json", Path.unlink), ("dataset_info.json", cut),
])  # fmt: skip
def test_damaged_data_of_tfds_are_refused(prepared, tmp_path, no_network, pattern, change):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    change(next((tmp_path / "mnist" / "3.0.1").glob(pattern)))
    with pytest.raises(data.DataError, match=r"3\.0\.1 cannot be read .*delete that folder"):
        data.load_mnist("tfds", data_dir=tmp_path)


def test_what_a_killed_tfds_left_is_not_taken_for_data(prepared, tmp_path, no_network):
    shutil.copytree(prepared / "mnist" / "3.0.1", tmp_path / "mnist" / "incomplete.ABCDEF_3.0.1")
    with pytest.raises(data.DataError, match="could not be downloaded"):
        data.load_mnist("tfds", data_dir=tmp_path)


@needs_tfds
def test_what_a_killed_tfds_left_does_not_stop_the_next_download(tmp_path):
    left, served = tmp_path / "tfds" / "mnist" / "incomplete.ABCDEF_3.0.1", tmp_path / "served"
    left.mkdir(parents=True)
    served.mkdir()
    with downloads_are(served):
        data.load_mnist("tfds", data_dir=tmp_path / "tfds")
    assert (tmp_path / "tfds" / "mnist" / "3.0.1" / "dataset_info.json").is_file()


def test_the_newest_version_is_found_by_number(tmp_path):
    from helpers.data import tfds

    for version in ("3.0.1", "10.0.0", "9.9.9"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "dataset_info.json").write_text("{}")
    assert tfds._newest_version(tmp_path).name == "10.0.0"


def test_a_download_that_another_process_has_made_meanwhile_is_used(prepared, tmp_path):
    from tensorflow_datasets.core.download import DownloadManager

    (tmp_path / "served").mkdir()
    with downloads_are(tmp_path / "served"), pytest.MonkeyPatch.context() as patch:
        serve = DownloadManager.download_and_extract

        def be_second(manager, urls):
            shutil.copytree(prepared, tmp_path / "tfds", dirs_exist_ok=True)
            return serve(manager, urls)

        patch.setattr(DownloadManager, "download_and_extract", be_second)
        digits = data.load_mnist("tfds", data_dir=tmp_path / "tfds")
    assert len(digits.train_labels) == 5
    assert tree(tmp_path / "tfds") == tree(prepared)


@needs_tfds
def test_a_file_where_the_folder_should_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataError, match="something is in the way"):
        data.load_mnist("tfds", data_dir=tmp_path / "file")


@needs_tfds
def test_no_network_is_told_and_leaves_nothing_half_done(tmp_path, no_network):
    with pytest.raises(data.DataError, match=r"could not be downloaded.*source='bundled'"):
        data.load_mnist("tfds", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_tfds
@pytest.mark.parametrize(("error", "message"), [
    (OSError(errno.ENOSPC, "No space left on device"), "no room"),
    (OSError("Not enough disk space. Needed: 11 MiB"), "no room"),
    (PermissionError(errno.EACCES, "Permission denied"), "cannot write"),
    (OSError("CERTIFICATE_VERIFY_FAILED"), "certificate is not valid"),
])  # fmt: skip
def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch, error, message):
    import tensorflow_datasets as datasets

    class Builder:
        def download_and_prepare(self, download_dir, **_):
            Path(download_dir).mkdir()
            Path(download_dir, "half").write_text("half")
            raise RuntimeError("failed") from error

    monkeypatch.setattr(datasets, "builder", lambda *_, **__: Builder())
    with pytest.raises(data.DataError, match=message):
        data.load_mnist("tfds", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_loader_imports_neither_tensorflow_nor_jax():
    import subprocess
    import sys

    code = (
        "import sys; from helpers import data; data.load_mnist(); "
        "sys.exit(sum(name in sys.modules for name in ('tensorflow', 'jax')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_default_folder_is_the_repositorys():
    assert (mnist.DATA_DIR.parent / "pyproject.toml").is_file()


@pytest.mark.parametrize("missing", ["tensorflow", "tensorflow_datasets"])
def test_missing_tfds_is_told_with_what_to_do(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "tensorflow_datasets":
        monkeypatch.setitem(sys.modules, "tensorflow", object())
    with pytest.raises(data.DataError, match=f"{missing} is not installed.*source='archive'"):
        data.load_mnist("tfds", data_dir=tmp_path)
