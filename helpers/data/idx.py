"""Reads the idx files that MNIST is published in.

The format: two zero bytes, a byte for the dtype (8 is uint8), a byte for the number of dimensions,
each dimension as a big-endian int32, then the values. Source: the description on Y. LeCun's MNIST
page, http://yann.lecun.com/exdb/mnist.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from helpers.data.errors import DataError

_UINT8 = 8
_AGAIN = "delete it and copy the file from the official archive again"


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Reads one idx file, gzipped or not.

    Args:
      path: The file; whether it is gzipped is told from its content, not its name.
      num_dimensions: Number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
      uint8 array of that many dimensions.

    Raises:
      DataError: The file cannot be read, is truncated or corrupt, is no idx file of bytes, or has
        another number of dimensions (images and labels were swapped).
    """
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path.name} is not an idx file (its first bytes are wrong); {_AGAIN}")
    dtype, dimensions = content[2], content[3]
    if dtype != _UINT8:
        raise DataError(f"{path.name} holds values of idx type {dtype}, expected bytes; {_AGAIN}")
    if dimensions != num_dimensions:
        kinds = {1: "labels", 3: "images"}
        found = kinds.get(dimensions, f"{dimensions}-dimensional data")
        raise DataError(
            f"{path.name} holds {found}, expected {kinds[num_dimensions]}; the images and labels "
            "files may be swapped: rename them"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path.name} is truncated in its header; {_AGAIN}")
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    expected, found = math.prod(shape), len(content) - start
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(
            f"{path.name} is {what}: its header says {expected} bytes of data, it has {found}; "
            f"{_AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name} is a damaged or truncated gzip file; {_AGAIN}") from error
