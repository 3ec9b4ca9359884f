"""Sharding pytrees; what needs devices runs in a process with 8 (`on_eight_devices`)."""

import json

import jax
import numpy as np
import pytest

from helpers import sharding


def tree(n=24):
    images = np.arange(n * 6).reshape(n, 2, 3).astype(np.uint8)
    return {"images": images, "pair": (np.arange(n, dtype=np.int32), np.linspace(0, 1, n))}


def same(left, right):
    flat = zip(jax.tree_util.tree_leaves(left), jax.tree_util.tree_leaves(right), strict=True)
    return all(np.allclose(a, b, rtol=1e-6) and a.shape == b.shape for a, b in flat)


def on_eight_devices():
    """What needs devices; returns facts for the tests to judge."""
    facts = {}
    for count in (1, 2, 3, 4, 8):
        sharded = sharding.shard(tree(), count)
        facts[f"layout {count}"] = [
            list(sharded["images"].shape),
            [shard.device.id for shard in sharded["images"].addressable_shards],
        ]
        facts[f"round trip {count}"] = same(sharding.unshard(sharded), tree())
    for count in (1, 2, 3, 4, 5, 8):
        sharded, mask = sharding.shard(tree(13), count, pad=True)
        facts[f"padded {count}"] = [list(mask.shape), int(mask.sum())]
        facts[f"padded round trip {count}"] = same(sharding.unshard(sharded, mask), tree(13))
    sharded = sharding.shard(tree())
    facts["dtype"] = str(sharded["images"].dtype)
    mapped = jax.pmap(lambda x: jax.lax.psum(x.sum(), "i"), axis_name="i")
    facts["sums"] = np.asarray(mapped(sharded["pair"][0])).tolist()
    copies = sharding.replicate({"x": np.arange(3.0), "y": 2}, 5)
    facts["copies"] = [list(copies["x"].shape), list(copies["y"].shape)]
    facts["first"] = same(sharding.unreplicate(copies), {"x": np.arange(3.0), "y": np.int32(2)})
    try:
        sharding.shard(np.zeros(6041), unit="users")
    except ValueError as error:
        facts["indivisible"] = str(error)
    return facts


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_each_device_holds_its_slice(facts, count):
    assert facts[f"layout {count}"] == [[count, 24 // count, 2, 3], list(range(count))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_unshard_undoes_shard(facts, count):
    assert facts[f"round trip {count}"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_padding_is_masked(facts, count):
    assert facts[f"padded {count}"] == [[count, -(-13 // count)], 13]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_unshard_with_the_mask_drops_the_padding(facts, count):
    assert facts[f"padded round trip {count}"]


def test_uint8_stays_uint8(facts):
    assert facts["dtype"] == "uint8"


def test_pmap_takes_what_shard_returns(facts):
    assert facts["sums"] == [276] * 8


def test_replicate_adds_the_axis_of_devices(facts):
    assert facts["copies"] == [[5, 3], [5]]


def test_unreplicate_undoes_replicate(facts):
    assert facts["first"]


def test_indivisible_size_is_refused(facts):
    assert facts["indivisible"] == (
        "cannot shard 6041 users over 8 devices; pad with sharding.pad_to_devices(...) "
        "or pass pad=True"
    )


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"num_devices is 1000, and JAX has \d+ here"):
        sharding.shard(np.zeros(1000), 1000)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True])
def test_bad_number_of_devices_is_refused(bad):
    with pytest.raises(ValueError, match="num_devices must be a positive integer or None"):
        sharding.replicate(np.zeros(3), bad)


def test_scalar_leaf_is_refused():
    with pytest.raises(ValueError, match=r"tree\['b'\] is a scalar; use replicate"):
        sharding.shard({"a": np.zeros(3), "b": 1.0}, 1)


def test_different_leading_sizes_are_refused():
    with pytest.raises(ValueError, match=r"same leading size everywhere, given .*3.*4"):
        sharding.shard({"a": np.zeros(3), "b": np.zeros(4)}, 1)


def test_empty_tree_is_refused():
    with pytest.raises(ValueError, match="shard was given a tree without arrays"):
        sharding.shard({}, 1)


def test_arrays_without_rows_are_refused():
    with pytest.raises(ValueError, match="given arrays without rows"):
        sharding.shard(np.zeros((0, 3)), 1)


@pytest.mark.parametrize(
    "function",
    [sharding.shard, sharding.unshard, sharding.replicate, sharding.unreplicate],
)
def test_call_under_jit_is_refused(function):
    with pytest.raises(TypeError, match="is traced: call it outside jit, pmap and vmap"):
        jax.jit(function)(np.zeros((1, 2)))


def test_unshard_of_a_vector_is_refused():
    with pytest.raises(ValueError, match="unshard needs arrays"):
        sharding.unshard(np.zeros(3))


def test_unshard_of_different_leading_sizes_is_refused():
    with pytest.raises(ValueError, match="same two leading sizes"):
        sharding.unshard([np.zeros((1, 3)), np.zeros((1, 4))])


@pytest.mark.parametrize("mask", [np.ones((1, 4), bool), np.ones((1, 3), int)])
def test_unshard_with_a_bad_mask_is_refused(mask):
    with pytest.raises(ValueError, match=r"mask must be bool \[1, 3\]"):
        sharding.unshard(np.zeros((1, 3)), mask)


if __name__ == "__main__":
    print(json.dumps(on_eight_devices()))
