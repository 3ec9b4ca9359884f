"""`shard_map` under one name; the notebook on it checks what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from helpers.jax_versions import shard_map


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ["data"])


@pytest.mark.parametrize("check", [True, False])
def test_shards_are_summed_over_the_axis(mesh, check):
    rows = np.arange(12.0, dtype=np.float32).reshape(4 * 3, 1)
    total = shard_map(
        lambda x: jax.lax.psum(x.sum(), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check=check,
    )
    assert jax.jit(total)(rows) == 66


def test_only_the_check_refuses_an_output_that_may_differ_by_device(mesh):
    def first(x, check):
        return shard_map(
            lambda x: x[:1], mesh=mesh, in_specs=P("data"), out_specs=P(), check=check
        )(x)

    rows = jnp.arange(4.0)
    with pytest.raises(ValueError, match="out_specs"):
        first(rows, True)
    np.testing.assert_array_equal(first(rows, False), [0.0])
