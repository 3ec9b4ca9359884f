import os
import subprocess
import sys

import numpy as np
import pytest

from helpers import checkpoint
from helpers.checkpoint import CheckpointError, Chunk, ChunkStore, DamagedChunkWarning

RUN = {"seed": "1", "model": "a"}


def _chunk(start, stop):
    return Chunk(start, stop, {"x": np.arange(start, stop, dtype=np.float32)})


@pytest.fixture
def store(tmp_path):
    """Three chunks of ten steps."""
    store = ChunkStore(tmp_path, RUN)
    for start in (0, 10, 20):
        store.save(_chunk(start, start + 10))
    return store


def _file(store, start):
    (path,) = store.directory.glob(f"chunk-{start:010d}-*")
    return path


def _spans(chunks):
    return [(chunk.start, chunk.stop) for chunk in chunks]


def test_chunks_come_back_in_order_as_they_were_saved(store):
    chunks = ChunkStore(store.directory, RUN).load()
    assert _spans(chunks) == [(0, 10), (10, 20), (20, 30)]
    np.testing.assert_array_equal(
        np.concatenate([chunk.arrays["x"] for chunk in chunks]), np.arange(30, dtype=np.float32)
    )


@pytest.mark.parametrize("position", [0, 20, 70, 100, 300, -1])
def test_one_flipped_bit_anywhere_is_noticed(store, position):
    path = _file(store, 20)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.warns(DamagedChunkWarning, match="the last good chunk, which ends at step 20"):
        chunks = store.load()
    assert _spans(chunks) == [(0, 10), (10, 20)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.99])
def test_a_truncated_chunk_is_noticed(store, share):
    path = _file(store, 20)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.warns(DamagedChunkWarning, match=path.name):
        assert _spans(store.load()) == [(0, 10), (10, 20)]


def test_damage_in_the_middle_drops_what_follows(store):
    _file(store, 10).write_bytes(b"")
    with pytest.warns(DamagedChunkWarning, match="ends at step 10"):
        assert _spans(store.load()) == [(0, 10)]


def test_a_damaged_first_chunk_says_that_the_run_begins_again(store):
    _file(store, 0).write_bytes(b"")
    with pytest.warns(DamagedChunkWarning, match="going on from the beginning"):
        assert store.load() == []


def test_a_missing_chunk_ends_what_can_be_used(store):
    _file(store, 10).unlink()
    assert _spans(store.load()) == [(0, 10)]


def test_a_chunk_saved_again_in_another_size_stands_in_for_a_damaged_one(store):
    _file(store, 20).write_bytes(b"")
    store.save(_chunk(20, 25))
    assert _spans(store.load()) == [(0, 10), (10, 20), (20, 25)]


def test_chunks_of_another_run_are_refused_by_what_differs(store):
    foreign = ChunkStore(store.directory, {**RUN, "seed": "2"})
    with pytest.raises(CheckpointError, match=r"another run \(seed: saved 1, given 2\)"):
        foreign.load()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(CheckpointError, match="in the way of a folder"):
        ChunkStore(path, RUN)


def test_a_write_that_fails_leaves_nothing_of_itself(store, monkeypatch):
    def fail(_):
        raise OSError("no space left on device")

    before = sorted(store.directory.iterdir())
    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        store.save(_chunk(30, 40))
    assert sorted(store.directory.iterdir()) == before


def test_a_kill_before_the_rename_leaves_the_earlier_chunks(store):
    script = """
import os, signal, sys
from helpers import checkpoint
from helpers.checkpoint import Chunk, ChunkStore
import numpy as np
checkpoint.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ChunkStore(sys.argv[1], {"seed": "1", "model": "a"}).save(Chunk(30, 40, {"x": np.ones(9)}))
"""
    command = [sys.executable, "-c", script, str(store.directory)]
    result = subprocess.run(command, env=os.environ, timeout=60, check=False)
    assert result.returncode == -9
    assert list(store.directory.glob("*.partial"))
    again = ChunkStore(store.directory, RUN)
    assert _spans(again.load()) == [(0, 10), (10, 20), (20, 30)]
    assert not list(store.directory.glob("*.partial"))


# --- process_directory


def test_one_process_keeps_its_chunks_in_the_folder_itself(store):
    assert checkpoint.process_directory(store.directory, 0, 1) == store.directory


def test_each_of_several_processes_has_a_folder_of_its_own(tmp_path):
    folders = [checkpoint.process_directory(tmp_path / "new", index, 3) for index in range(3)]
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "new"}
    for folder in folders:
        ChunkStore(folder, RUN).save(_chunk(0, 10))
    assert [checkpoint.process_directory(tmp_path / "new", i, 3) for i in range(3)] == folders


@pytest.mark.parametrize(("saved", "started"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_processes_is_refused_and_loses_nothing(tmp_path, saved, started):
    for index in range(saved):
        ChunkStore(checkpoint.process_directory(tmp_path, index, saved), RUN).save(_chunk(0, 10))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"holds chunks of {saved} process.* has {started}"):
        checkpoint.process_directory(tmp_path, 0, started)
    assert sorted(tmp_path.rglob("*")) == before
