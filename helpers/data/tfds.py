"""Data sets by TensorFlow Datasets, also where there is no network.

TFDS asks the network about a data set even when all of it is on disk, and a download that is cut
off must never be taken for a good one. So what is on disk is opened by its folder, without asking
anybody; and a data set is prepared in a folder beside its place and moved there when it is whole.
"""

import contextlib
import errno
import io
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from helpers.data.errors import DataError


def load_arrays(
    name: str,
    folder: Path,
    splits: Sequence[str],
    features: tuple[str, ...],
) -> dict[str, tuple[np.ndarray, ...]]:
    """Loads splits of a data set as arrays, downloading it first if it is not there.

    Args:
      name: Name of the data set in TFDS.
      folder: Where TFDS data sets are kept.
      splits: Names of the splits.
      features: Names of the features.

    Returns:
      For each split, one array a feature `[num_examples, ...]`. Sequences of different lengths are
      filled up with -1.

    Raises:
      DataError: The data set is not on disk and cannot be downloaded or stored, or what is on disk
        is damaged.
    """
    tfds = _import_tfds()
    version = _newest_version(folder / name)
    if version is None:
        _prepare(tfds, name, folder)
        version = _newest_version(folder / name)
    return _read(tfds, version, splits, features)


def load_class_names(name: str, folder: Path, feature: str) -> tuple[str, ...]:
    """Loads what the integers of a feature stand for, from a data set that is on disk.

    Args:
      name: Name of the data set in TFDS.
      folder: Where TFDS data sets are kept.
      feature: Name of a feature that is a class, or a sequence of classes.

    Returns:
      A name an integer, from 0.

    Raises:
      DataError: What is on disk is damaged, or there is none.
    """
    tfds = _import_tfds()
    version = _newest_version(folder / name)
    if version is None:
        raise DataError(f"{name} is not in {folder}; load its arrays first, which downloads it")
    with _damage_told(version):
        found = tfds.builder_from_directory(version).info.features[feature]
        return tuple(getattr(found, "feature", found).names)


def _import_tfds():
    # Outside Google's own machines the look at its storage only costs a time-out.
    os.environ.setdefault("NO_GCE_CHECK", "true")
    try:
        import tensorflow
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DataError(
            f"source='tfds' needs TensorFlow Datasets, and {error.name} is not installed: run "
            "\"pip install tensorflow tensorflow-datasets\", or use source='archive' or "
            "source='bundled'"
        ) from error
    del tensorflow  # TFDS imports it when it first reads, where an error would say less.

    return tfds


def _newest_version(folder: Path) -> Path | None:
    """Finds the newest version of a data set that is on disk whole.

    TFDS writes to `incomplete.…_3.0.1` and renames that to `3.0.1` at the end, so a folder with
    any other name than a version is what a killed process left.
    """
    found = {
        tuple(map(int, path.parent.name.split("."))): path.parent
        for path in folder.glob("*/dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.parent.name)
    }
    return found[max(found)] if found else None


def _read(
    tfds,
    version: Path,
    splits: Sequence[str],
    features: tuple[str, ...],
) -> dict[str, tuple[np.ndarray, ...]]:
    """Reads a version from its folder; TFDS checks each record, and their number."""
    import tensorflow as tf

    arrays = {}
    with _damage_told(version):
        builder = tfds.builder_from_directory(version)
        decoders = tfds.decode.PartialDecoding(dict.fromkeys(features, True))
        for split in splits:
            examples = builder.as_dataset(split=split, decoders=decoders)
            # TFDS' own batches are padded with zeros, and 0 is a class like any other.
            batch = examples.ragged_batch(builder.info.splits[split].num_examples)
            columns = batch.get_single_element()
            arrays[split] = tuple(
                (column.to_tensor(-1) if isinstance(column, tf.RaggedTensor) else column).numpy()
                for column in (columns[feature] for feature in features)
            )
    return arrays


@contextlib.contextmanager
def _damage_told(version: Path):
    """Tells of a data set on disk that cannot be read."""
    import tensorflow as tf
    from google.protobuf import json_format

    try:
        yield
    except (tf.errors.OpError, json_format.ParseError, OSError, ValueError) as error:
        raise DataError(
            f"{version} cannot be read ({_first_line(error)}); if it is damaged, delete that "
            "folder and load again"
        ) from error


def _prepare(tfds, name: str, folder: Path) -> None:
    """Downloads a data set beside its place and moves it there when it is whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
            builder = tfds.builder(name, data_dir=partial)
            # What TFDS prints names the folder beside, which is gone afterwards; its progress bars
            # do not go this way and stay.
            with _few_retries(), contextlib.redirect_stdout(io.StringIO()):
                builder.download_and_prepare(
                    download_dir=os.path.join(partial, "downloads"), file_format="tfrecord"
                )
            made = Path(builder.data_dir)
            place = folder / made.relative_to(partial)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                made.rename(place)
            except OSError:
                # Another process may have been first: then its data are as good as these.
                if _newest_version(folder / name) is None:
                    raise
    except Exception as error:
        raise DataError(_advice(name, folder, error)) from error


@contextlib.contextmanager
def _few_retries():
    """Makes TFDS give up after seconds: without a network its ten tries take minutes."""
    from tensorflow_datasets.core.download import downloader

    before, downloader.MAX_RETRIES = downloader.MAX_RETRIES, 3
    try:
        yield
    finally:
        downloader.MAX_RETRIES = before


def _advice(name: str, folder: Path, error: Exception) -> str:
    chain, reasons = error, []
    while chain is not None:
        reasons.append(chain)
        chain = chain.__cause__ or chain.__context__
    codes = {getattr(reason, "errno", None) for reason in reasons}
    text = _first_line(error)
    # TFDS looks at the room beforehand too, and its error for that has no errno.
    if errno.ENOSPC in codes or any("Not enough disk space" in str(r) for r in reasons):
        return f"no room in {folder} for {name}: free some, or pass another data_dir ({text})"
    if codes & {errno.EACCES, errno.EROFS}:
        return f"cannot write to {folder}: pass a data_dir that can be written to ({text})"
    if codes & {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
        return f"something is in the way of {name} in {folder}: delete or move it ({text})"
    if any("CERTIFICATE" in str(reason) for reason in reasons):
        return (
            f"{name} was not downloaded: its host's certificate is not valid ({text}). It stays "
            "checked. Wait for the host, or get the official files from elsewhere or with a "
            "browser and use source='archive'; source='bundled' needs none"
        )
    return (
        f"{name} could not be downloaded ({text}); without a network use source='bundled', or copy "
        "the official files by hand and use source='archive'. Nothing of it was kept"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
