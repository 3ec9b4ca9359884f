"""Loading digits: each source, and everything that can be wrong with files and networks."""

import errno
import gzip
import socket
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


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_bundled_digits_are_the_uci_digits():
    digits = data.load_mnist()
    assert digits.source == "bundled"
    assert (len(digits.train_labels), len(digits.test_labels)) == (1442, 355)
    assert digits.image_shape == (8, 8)
    assert digits.dtype == np.uint8
    assert digits.train_images.max() == digits.pixel_max == 16
    # 178 to 183 images a digit in all; every fifth of each tests.
    assert digits.class_counts["test"].tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]


def test_bundled_digits_are_the_same_every_time():
    assert data.load_mnist().checksum == data.load_mnist().checksum


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


def test_what_tfds_has_on_disk_is_read_without_a_network(tmp_path, no_network):
    import tensorflow_datasets as datasets

    from helpers.data import tfds

    builder = datasets.testing.DummyMnist(data_dir=tmp_path)
    builder.download_and_prepare()
    arrays = tfds.load_arrays("dummy_mnist", tmp_path, ("train", "test"), ("image", "label"))
    images, labels = arrays["train"]
    assert images.shape == (20, 28, 28, 1)
    assert images.dtype == np.uint8
    assert len(labels) == 20


def test_no_network_is_told_and_leaves_nothing_half_done(tmp_path, no_network):
    with pytest.raises(data.DataError, match=r"could not be downloaded.*source='bundled'"):
        data.load_mnist("tfds", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "message"), [
    (OSError(errno.ENOSPC, "No space left on device"), "no room"),
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
