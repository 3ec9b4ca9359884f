"""Sequences: ragged cohorts against NumPy, and every way to pass one."""

import collections

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.federated import tff, transfer

FLOATS = cases.FLOATS
add, double, total, doubled = cases.add, cases.double, cases.total, cases.doubled


@tff.federated_computation(tff.FederatedType(FLOATS, tff.CLIENTS))
def totals(data):
    return tff.federated_map(total, data)


def _dataset(values):
    """A `tf.data.Dataset` of arrays, where there is TensorFlow."""
    tf = pytest.importorskip("tensorflow", reason="lane B has no TensorFlow")
    return tf.data.Dataset.from_tensor_slices(values)


class Iterated:
    """What a `tf.data.Dataset` is to the runtime."""

    def __init__(self, values):
        self._values = values

    def as_numpy_iterator(self):
        return iter(self._values)


WAYS = {
    "list": lambda values: values,
    "tuple": tuple,
    "generator": lambda values: (value for value in values),
    "array": lambda values: np.array(values, np.float32),
    "like a dataset": lambda values: Iterated(np.array(values, np.float32)),
    "dataset": lambda values: _dataset(np.array(values, np.float32)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("values", [[], [3.0], [1.0, 2.0, 4.0]])
def test_a_sequence_may_come_as(way, values):
    assert total(way(values)) == sum(values)


def test_a_dataset_of_structures_binds_by_name():
    element = collections.OrderedDict(b=tff.TensorType(np.float32, (2,)), a=np.int32)
    computation = tff.federated_computation(
        lambda values: tff.sequence_sum(values), tff.SequenceType(element)
    )
    rows = np.arange(4)
    dataset = _dataset({"a": rows.astype(np.int32), "b": np.stack([rows, rows], 1).astype("f4")})
    got = computation(dataset)
    assert got["a"] == 6
    np.testing.assert_array_equal(got["b"], [6, 6])


def test_the_sum_of_no_elements_is_zero():
    computation = tff.federated_computation(lambda values: tff.sequence_sum(values), FLOATS)
    assert computation([]) == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    seed=st.integers(0, 10_000),
)
def test_training_on_any_cohort_equals_numpy(lengths, seed):
    cohort = cases.random_cohort(np.random.default_rng(seed), lengths)
    got = _TRAIN_EACH(cases.zeros(), cohort)
    for model, batches in zip(got, cohort, strict=True):
        wanted, _ = cases.numpy_train(cases.zeros(), batches)
        for name in wanted:
            np.testing.assert_allclose(model[name], wanted[name], rtol=1e-4, atol=1e-6)


def _build_train_each():
    import jax

    @tff.jax.computation(cases.MODEL_TYPE, cases.BATCH_TYPE)
    def step(model, batch):
        gradient = jax.grad(cases.loss)(model, batch)
        return jax.tree_util.tree_map(lambda p, g: p - cases.STEP_SIZE * g, model, gradient)

    @tff.federated_computation(cases.MODEL_TYPE, tff.SequenceType(cases.BATCH_TYPE))
    def train(model, batches):
        return tff.sequence_reduce(batches, model, step)

    @tff.federated_computation(
        tff.FederatedType(cases.MODEL_TYPE, tff.SERVER),
        tff.FederatedType(tff.SequenceType(cases.BATCH_TYPE), tff.CLIENTS),
    )
    def train_each(model, data):
        return tff.federated_map(train, (tff.federated_broadcast(model), data))

    return train_each


_TRAIN_EACH = _build_train_each()


def test_a_cohort_of_a_thousand_with_one_large_client():
    lengths = [1] * 1000
    lengths[500] = 300
    generator = np.random.default_rng(0)
    cohort = [generator.integers(0, 9, length).astype(np.float32) for length in lengths]
    assert totals(cohort) == [client.sum() for client in cohort]


def test_storage_grows_with_the_data_and_not_with_the_largest_client():
    cohort = [[1.0]] * 1000 + [[1.0] * 1000]
    layout = transfer.ClientLayout(1001, 1)
    value = transfer.ingest(cohort, tff.FederatedType(FLOATS, tff.CLIENTS), layout)
    assert value.capacity <= 2000 * 1.25


def test_a_mapped_sequence_can_be_returned_and_reduced():
    @tff.federated_computation(FLOATS)
    def both(values):
        mapped = tff.sequence_map(double, values)
        return mapped, tff.sequence_reduce(mapped, np.float32(0), add)

    assert both([1.0, 2.0]) == ([2, 4], 6)
    assert both([]) == ([], 0)


def test_mapped_sequences_can_be_returned_from_the_clients():
    computation = tff.federated_computation(
        lambda data: (tff.federated_map(doubled, data), data),
        tff.FederatedType(FLOATS, tff.CLIENTS),
    )
    cohort = [[1.0, 2.0], [], [3.0]]
    assert computation(cohort) == ([[2, 4], [], [6]], cohort)


def test_mapped_sequences_can_be_mapped_and_reduced_later():
    @tff.federated_computation(tff.FederatedType(FLOATS, tff.CLIENTS))
    def computation(data):
        once = tff.federated_map(doubled, data)
        twice = tff.federated_map(doubled, once)
        return tff.federated_map(total, twice), tff.federated_sum(tff.federated_map(total, once))

    assert computation([[1.0, 2.0], [], [3.0]]) == ([12, 0, 12], 12)


def test_a_sequence_is_passed_on_beside_other_values():
    @tff.federated_computation({"scale": np.float32, "values": FLOATS})
    def scaled(x):
        return add(x["scale"], total(x["values"])), x["values"]

    @tff.federated_computation(
        tff.FederatedType(np.float32, tff.SERVER), tff.FederatedType(FLOATS, tff.CLIENTS)
    )
    def computation(scale, data):
        zipped = tff.federated_zip({"scale": tff.federated_broadcast(scale), "values": data})
        return tff.federated_map(scaled, zipped)

    assert computation(10.0, [[1.0], [2.0, 3.0]]) == [(11, [1]), (15, [2, 3])]


def test_a_sequence_at_the_server():
    computation = tff.federated_computation(
        lambda data: tff.federated_map(total, data), tff.FederatedType(FLOATS, tff.SERVER)
    )
    assert computation([1.0, 2.0, 3.0]) == 6


SCALED = [([1.0, 10.0, 100.0], [1.0, 2.0]), ([3.0], [1.0]), ([1.0, 2.0], [])]


@pytest.mark.parametrize(("scales", "values"), SCALED)
def test_each_client_may_map_a_broadcast_sequence_to_another(scales, values):
    wanted = [[scale * value for value in values] for scale in scales]
    assert cases.scaled_for_each(scales, values) == wanted


@pytest.mark.usefixtures("debug")
def test_each_client_may_map_a_broadcast_sequence_to_another_in_debug_mode():
    assert cases.scaled_for_each([1.0, 10.0], [1.0, 2.0]) == [[1, 2], [10, 20]]


def test_a_broadcast_sequence_is_stored_once_and_passed_on_to_all():
    @tff.federated_computation(
        tff.FederatedType(np.float32, tff.CLIENTS), tff.FederatedType(FLOATS, tff.SERVER)
    )
    def computation(x, values):
        pairs = tff.federated_zip((x, tff.federated_broadcast(values)))
        same = tff.federated_computation(lambda pair: (pair[1], pair[0]), (np.float32, FLOATS))
        return tff.federated_map(same, pairs)

    assert computation([1.0, 2.0], [5.0, 6.0]) == [([5, 6], 1), ([5, 6], 2)]


def test_a_mapped_sequence_may_change_the_structure_of_its_elements():
    element = collections.OrderedDict(b=collections.OrderedDict(c=np.float32), a=np.int32)
    swap = tff.jax.computation(lambda e: (e["a"], {"z": 2 * e["b"]["c"]}), element)
    computation = tff.federated_computation(
        lambda values: tff.sequence_map(swap, values), tff.SequenceType(element)
    )
    given = [{"a": n, "b": {"c": n / 2}} for n in range(3)]
    assert computation(given) == [(0, {"z": 0}), (1, {"z": 1}), (2, {"z": 2})]


@pytest.mark.parametrize("cohort", [[[]], [[], [], []]])
def test_clients_without_any_element_keep_the_zero(cohort):
    assert totals(cohort) == [0] * len(cohort)


def test_a_sequence_may_be_read_in_two_ways_by_one_client():
    @tff.federated_computation(FLOATS)
    def both(values):
        return total(values), total(doubled(values)), doubled(doubled(values))

    computation = tff.federated_computation(
        lambda data: tff.federated_map(both, data), tff.FederatedType(FLOATS, tff.CLIENTS)
    )
    assert computation([[1.0, 2.0], []]) == [(3, 6, [4, 8]), (0, 0, [])]


def test_the_reduction_goes_from_the_first_element_to_the_last():
    digits = tff.jax.computation(lambda number, digit: 10 * number + digit, np.int32, np.int32)
    computation = tff.federated_computation(
        lambda values: tff.sequence_reduce(values, np.int32(0), digits), tff.SequenceType(np.int32)
    )
    assert computation([1, 2, 3, 4]) == 1234


def test_an_error_in_a_generator_reaches_the_caller_and_the_context_stays_usable():
    with pytest.raises(ZeroDivisionError):
        total(1 / n for n in (1, 0))
    assert total([1.0]) == 1


def test_a_dataset_with_a_ragged_last_batch_is_refused_with_its_place():
    computation = tff.federated_computation(
        lambda data: data, tff.SequenceType(tff.TensorType(np.float32, (2,)))
    )
    dataset = _dataset(np.ones(5, np.float32)).batch(2)
    with pytest.raises(TypeError, match=r"batch 2: expected shape \[2\].*drop_remainder=True"):
        computation(dataset)
