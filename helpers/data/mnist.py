"""Handwritten digits: full MNIST from TensorFlow Datasets or from its files, or what is bundled."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from helpers.data.errors import DataError
from helpers.data.idx import read_idx

Source = Literal["bundled", "archive", "tfds"]
SOURCES = ("bundled", "archive", "tfds")
DATA_DIR = Path(__file__).resolve().parents[2] / "data"

_NUM_CLASSES = 10
_FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}
# Of the content, since mirrors compress the same images into different files.
_KNOWN_CHECKSUMS = {
    "test": "0ed8b627d524425439d1c57c4d9a1bf1f10cba48bea42424fcca4634d9ceb740",
}


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Labelled images, split into training and test examples, and where they came from.

    Attributes:
      source: 'bundled', 'archive' or 'tfds'.
      train_images: uint8 `[num_train, height, width]`; no examples where the split was not loaded.
      train_labels: int32 `[num_train]`.
      test_images: uint8 `[num_test, height, width]`.
      test_labels: int32 `[num_test]`.
      pixel_max: The largest value a pixel can have: 16 in the bundled digits, 255 in MNIST.
    """

    source: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    pixel_max: int

    @property
    def num_classes(self) -> int:
        """Number of different labels there can be."""
        return _NUM_CLASSES

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width."""
        return self.train_images.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the pixels."""
        return self.train_images.dtype

    @property
    def class_counts(self) -> dict[str, np.ndarray]:
        """Number of examples of each label by split, int64 `[num_classes]`."""
        return {
            "train": np.bincount(self.train_labels, minlength=_NUM_CLASSES),
            "test": np.bincount(self.test_labels, minlength=_NUM_CLASSES),
        }

    @property
    def checksum(self) -> str:
        """SHA-256 of all arrays, their dtypes and shapes, in hexadecimal.

        The order of the examples counts: TFDS stores the images of MNIST in another order than the
        official files, so the two sources have different checksums.
        """
        return _checksum(self.train_images, self.train_labels, self.test_images, self.test_labels)

    def __str__(self) -> str:
        height, width = self.image_shape
        return (
            f"digits from {self.source}: {len(self.train_labels)} training and "
            f"{len(self.test_labels)} test images, {height} x {width}, {self.dtype} up to "
            f"{self.pixel_max}, sha256 {self.checksum[:12]}\n"
            f"training images by label: {self.class_counts['train'].tolist()}"
        )


def load_mnist(
    source: Source = "bundled",
    *,
    data_dir: str | Path | None = None,
    splits: Sequence[str] = ("train", "test"),
) -> ImageDataset:
    """Loads handwritten digits.

    Args:
      source: 'bundled', the 1,797 UCI digits of 8 x 8 pixels that scikit-learn ships (every fifth
        of each label is a test image); 'archive', the four official MNIST files, gzipped or not, in
        `data_dir`; 'tfds', MNIST by TensorFlow Datasets, which downloads it on first use.
      data_dir: Where the files of 'archive' are, or where TFDS keeps its data sets; by default the
        repository's `data/` and `data/tfds/`.
      splits: Which of 'train' and 'test' to load; the other is empty.

    Returns:
      The images, with pixels as they are stored; see `to_float`.

    Raises:
      ValueError: `source` or a split is unknown.
      DataError: A file is missing, damaged, swapped with another or ambiguous, or MNIST cannot be
        downloaded.
    """
    unknown = set(splits) - {"train", "test"}
    if unknown or not splits:
        raise ValueError(f"splits must name 'train', 'test' or both, given {list(splits)!r}")
    if source == "bundled":
        return _select(_load_bundled(), splits)
    if source == "archive":
        return _load_archive(Path(data_dir) if data_dir is not None else DATA_DIR, splits)
    if source == "tfds":
        from helpers.data import tfds

        folder = Path(data_dir) if data_dir is not None else DATA_DIR / "tfds"
        arrays = tfds.load_arrays("mnist", folder, splits, ("image", "label"))
        return _dataset("tfds", {s: (i[..., 0], labels) for s, (i, labels) in arrays.items()}, 255)
    raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, given {source!r}")


def to_float(images, pixel_max: int):
    """Scales pixels to float32 between 0 and 1.

    Args:
      images: uint8 `[...]`, a NumPy or JAX array (inside `jit` too, so that uint8 travels to the
        device and float32 is made there).
      pixel_max: The largest value a pixel can have.

    Returns:
      float32 array of the same shape.
    """
    return images.astype(np.float32) / np.float32(pixel_max)


def _load_bundled() -> ImageDataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.int32)
    # Every fifth image of each label, so that both splits hold the labels in the same shares.
    is_test = np.zeros(len(labels), bool)
    for label in range(_NUM_CLASSES):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    arrays = {
        "train": (images[~is_test], labels[~is_test]),
        "test": (images[is_test], labels[is_test]),
    }
    return _dataset("bundled", arrays, 16)


def _load_archive(folder: Path, splits: Sequence[str]) -> ImageDataset:
    arrays = {}
    for split in splits:
        images_name, labels_name = _FILES[split]
        images = read_idx(_find(folder, f"{images_name}-idx3-ubyte"), 3)
        labels = read_idx(_find(folder, f"{labels_name}-idx1-ubyte"), 1)
        arrays[split] = (images, labels)
    dataset = _dataset("archive", arrays, 255)
    _check_known(dataset, splits)
    return dataset


def _find(folder: Path, name: str) -> Path:
    """Finds one of the four files under the names it is known by."""
    try:
        present = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        present = set()
    except OSError as error:
        raise DataError(
            f"cannot list {folder}: {error.strerror}; pass a data_dir that is a folder and can be "
            "read"
        ) from error
    stem, kind, suffix = name.rsplit("-", 2)
    names = [f"{stem}{dash}{kind}-{suffix}{gz}" for dash in "-." for gz in ("", ".gz")]
    found = [folder / candidate for candidate in names if candidate in present]
    if not found:
        raise DataError(
            f"{name} (or {name}.gz) is not in {folder}; put the four official MNIST files there, "
            "or use source='bundled'"
        )
    if len(found) > 1:
        dimensions = int(kind.removeprefix("idx"))
        first, *others = (read_idx(path, dimensions) for path in found)
        if any(not np.array_equal(first, other) for other in others):
            raise DataError(
                f"{' and '.join(path.name for path in found)} differ in content; keep one of them"
            )
    return found[0]


def _check_known(dataset: ImageDataset, splits: Sequence[str]) -> None:
    """Refuses files that pass for MNIST's by name and size and are not, and swapped splits."""
    known = _KNOWN_CHECKSUMS["test"]
    if "test" in splits and dataset.test_images.shape == (10000, 28, 28):
        found = _checksum(dataset.test_images, dataset.test_labels)
        if found != known:
            raise DataError(
                f"the test files have the shape of MNIST but other content (sha256 {found[:12]}, "
                f"expected {known[:12]}); copy them from the official archive again"
            )
    if _checksum(dataset.train_images, dataset.train_labels) == known:
        raise DataError(
            "the train files hold MNIST's test images; the train and t10k files may be swapped: "
            "rename them"
        )


def _dataset(source: str, arrays: dict, pixel_max: int) -> ImageDataset:
    fields = {}
    height, width = next(iter(arrays.values()))[0].shape[1:]
    for split in ("train", "test"):
        empty = (np.zeros((0, height, width), np.uint8), np.zeros((0,), np.int32))
        images, labels = arrays.get(split, empty)
        if images.shape[1:] != (height, width):
            raise DataError(
                f"the {split} images are {images.shape[1]} x {images.shape[2]}, those of the other "
                f"split {height} x {width}; the files are not of one archive: copy all four from "
                "the same place"
            )
        if len(images) != len(labels):
            raise DataError(
                f"the {split} split has {len(images)} images and {len(labels)} labels; the files "
                "are not of one archive: copy all four from the same place"
            )
        if len(labels) and (labels.min() < 0 or labels.max() >= _NUM_CLASSES):
            raise DataError(
                f"the {split} labels run from {labels.min()} to {labels.max()}, expected 0 to 9"
            )
        fields[f"{split}_images"] = images.astype(np.uint8)
        fields[f"{split}_labels"] = labels.astype(np.int32)
    return ImageDataset(source=source, pixel_max=pixel_max, **fields)


def _select(dataset: ImageDataset, splits: Sequence[str]) -> ImageDataset:
    emptied = {
        f"{split}_{what}": getattr(dataset, f"{split}_{what}")[:0]
        for split in {"train", "test"} - set(splits)
        for what in ("images", "labels")
    }
    return dataclasses.replace(dataset, **emptied)


def _checksum(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
