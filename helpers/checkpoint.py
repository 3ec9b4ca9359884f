"""Chunks of a long run on disk: each is whole or not there, and a damaged one is noticed.

A folder holds one file a chunk, with what the chunk produced and all that is needed to go on after
it. A file is a line with the SHA-256 of the rest, then a NumPy archive. It is written beside its
place, flushed to disk and renamed, so that a kill at any moment leaves the chunks before it.

Why not Orbax, which is JAX's checkpoint library: tried with its defaults, the release that lane A's
pins admit (0.4.4) failed to save with the tensorstore that they admit (0.1.45), and the current one
(0.12.8) gave back other numbers without an error when a bit of its data file was flipped (15 of 15
tries). Its strength, arrays that are spread over many hosts, is not needed for one chunk's state.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_MAGIC = b"helpers.checkpoint 1 sha256="
_HEADER_SIZE = len(_MAGIC) + 64 + 1
_NAME = re.compile(r"chunk-(\d+)-(\d+)\.npz\.sha256")
_META = "__meta__"


class CheckpointError(RuntimeError):
    """A folder of chunks cannot be used for this run; the message says why and what would work."""


class DamagedChunkWarning(UserWarning):
    """A chunk on disk is damaged, and the run goes on from the last good one before it."""


def process_directory(directory: str | os.PathLike, process_index: int, num_processes: int) -> Path:
    """Says where one of several processes keeps its chunks, which hold its devices' part.

    Args:
      directory: The folder of the run, on a disk of this process or one that all share.
      process_index: This process.
      num_processes: Processes of the run.

    Returns:
      `directory` itself for one process, else a folder in it.

    Raises:
      CheckpointError: Another number of processes has saved chunks there.
    """
    directory = Path(directory)
    others = {path.name.rpartition("-")[2] for path in directory.glob("process-*-of-*")}
    if any(directory.glob("chunk-*.npz.sha256")):
        others.add("1")
    if different := others - {str(num_processes)}:
        raise CheckpointError(
            f"{directory} holds chunks of {min(different)} process"
            f"{'' if min(different) == '1' else 'es'}, and this run has {num_processes}; start as "
            "many, or give another checkpoint_dir"
        )
    if num_processes == 1:
        return directory
    return directory / f"process-{process_index}-of-{num_processes}"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one chunk of a run produced.

    Attributes:
      start: Steps of the run before this chunk.
      stop: Steps of the run after this chunk.
      arrays: What was saved, by name. A dtype that NumPy does not know (bfloat16) comes back as
        raw bytes of its size, for the caller to view as what it was.
    """

    start: int
    stop: int
    arrays: dict[str, np.ndarray]


class ChunkStore:
    """The chunks of one run in one folder. One process at a time may write to it."""

    def __init__(self, directory: str | os.PathLike, fingerprint: Mapping[str, str]):
        """Opens the folder, and makes it if it is missing.

        Args:
          directory: The folder.
          fingerprint: What a run must share with the chunks to be continued from them, by a name
            that a reader understands.

        Raises:
          CheckpointError: The path is there and is no folder.
        """
        self._directory = Path(directory)
        self._fingerprint = dict(fingerprint)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CheckpointError(
                f"checkpoint_dir={str(directory)!r} is in the way of a folder; give the path of a "
                "folder, or of one to be made"
            ) from error
        for partial in self._directory.glob("chunk-*.partial"):
            partial.unlink(missing_ok=True)  # Left by a process that was killed while it wrote.

    @property
    def directory(self) -> Path:
        """The folder."""
        return self._directory

    def load(self) -> list[Chunk]:
        """Reads the chunks from the beginning of the run up to the first gap or damage.

        Returns:
          Chunks in order, each starting where the one before it stopped.

        Raises:
          CheckpointError: A whole chunk belongs to another run.

        Warns:
          DamagedChunkWarning: A chunk was there and was damaged.
        """
        paths: dict[int, list[tuple[int, Path]]] = {}
        for path in self._directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                paths.setdefault(int(match[1]), []).append((int(match[2]), path))
        chunks: list[Chunk] = []
        start = 0
        while start in paths:
            chunk = self._first_good(start, sorted(paths[start], reverse=True))
            if chunk is None:
                break
            chunks.append(chunk)
            start = chunk.stop
        return chunks

    def _first_good(self, start: int, candidates: list[tuple[int, Path]]) -> Chunk | None:
        """Reads the first of several files that is whole; there are several if sizes changed."""
        damages = []
        for stop, path in candidates:
            try:
                meta, arrays = _read(path)
            except _Damaged as damage:
                damages.append(f"{path.name} ({damage})")
                continue
            self._check_fingerprint(path, meta["fingerprint"])
            return Chunk(start=start, stop=stop, arrays=arrays)
        warnings.warn(
            f"damaged in {self._directory}: {', '.join(damages)}; going on from "
            + (f"the last good chunk, which ends at step {start}" if start else "the beginning"),
            DamagedChunkWarning,
            stacklevel=2,
        )
        return None

    def _check_fingerprint(self, path: Path, saved: Mapping[str, str]) -> None:
        given = self._fingerprint
        different = [
            f"{key}: saved {saved.get(key, 'nothing')}, given {given.get(key, 'nothing')}"
            for key in sorted(given.keys() | saved.keys())
            if given.get(key) != saved.get(key)
        ]
        if different:
            raise CheckpointError(
                f"{path} belongs to another run ({'; '.join(different)}); call with what that run "
                "was started with, or give another checkpoint_dir, or delete this one"
            )

    def save(self, chunk: Chunk) -> None:
        """Writes a chunk to disk; when this returns, it outlasts a crash of the machine.

        Args:
          chunk: What to write. A file of the same steps is replaced.

        Raises:
          OSError: It could not be written; no part of it is left, and earlier chunks are as before.
        """
        buffer = io.BytesIO()
        buffer.write(_MAGIC + b"0" * 64 + b"\n")
        meta = json.dumps({"fingerprint": self._fingerprint}).encode()
        np.savez(buffer, **{_META: np.frombuffer(meta, np.uint8)}, **chunk.arrays)
        with buffer.getbuffer() as content:
            digest = hashlib.sha256(content[_HEADER_SIZE:]).hexdigest()
            content[len(_MAGIC) : len(_MAGIC) + 64] = digest.encode()
            _write_atomically(self._path(chunk.start, chunk.stop), content)

    def _path(self, start: int, stop: int) -> Path:
        return self._directory / f"chunk-{start:010d}-{stop:010d}.npz.sha256"


class _Damaged(Exception):
    """The file is not what was written."""


def _read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    content = path.read_bytes()
    header, payload = content[:_HEADER_SIZE], memoryview(content)[_HEADER_SIZE:]
    if not header.startswith(_MAGIC) or len(header) < _HEADER_SIZE:
        raise _Damaged("its first line is not a checkpoint's")
    if header != _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise _Damaged("its content does not have the checksum in its first line")
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return json.loads(arrays.pop(_META).tobytes()), arrays


def _write_atomically(path: Path, content: memoryview) -> None:
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=f"{path.name.partition('.')[0]}-", suffix=".partial"
    )
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # A Ctrl-C too must leave nothing half-written.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Makes a rename in the folder outlast a power cut, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
