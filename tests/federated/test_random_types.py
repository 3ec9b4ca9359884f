"""Values of random types at every placement: nothing lost, mixed up or changed."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import federated
from helpers.federated import tff, transfer

NUMBERS = [
    np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32,
    np.float16, ml_dtypes.bfloat16, np.float32, np.complex64,
]  # fmt: skip


def tensors(dtypes):
    """Tensor types."""
    shapes = st.sampled_from([(), (2,), (0,), (2, 3)])
    return st.builds(tff.TensorType, st.sampled_from(dtypes), shapes)


def structs(members):
    """Struct types, all fields named (in any order) or none."""
    unnamed = st.lists(members, max_size=3).map(lambda m: [(None, part) for part in m])
    names = st.permutations(["b", "a", "c"])
    named = st.builds(
        lambda n, m: list(zip(n, m)), names, st.lists(members, min_size=1, max_size=3)
    )
    return (unnamed | named).map(tff.StructType)


def types(dtypes):
    """Tensor types and structs nested up to three deep."""
    everything = st.recursive(tensors(dtypes), structs, max_leaves=4)
    return everything.filter(transfer.tensor_types)  # A sequence needs a tensor to count by.


def random_value(type_spec, generator):
    """A value of small whole numbers, so that sums are exact; the fields of a dict in any order."""
    if isinstance(type_spec, tff.StructType):
        fields = [
            (name, random_value(field, generator))
            for name, field in tff.structure.to_elements(type_spec)
        ]
        if all(name is None for name, _ in fields):
            return [value for _, value in fields]
        return dict(fields[index] for index in generator.permutation(len(fields)))
    value = generator.integers(0, 2 if type_spec.dtype == np.bool_ else 5, type_spec.shape)
    return np.asarray(value).astype(type_spec.dtype)


def same(got, wanted, type_spec):
    """Checks a value, its dtypes and its names against the type."""
    if isinstance(type_spec, tff.StructType):
        fields = tff.structure.to_elements(type_spec)
        if isinstance(got, dict):
            assert list(got) == [name for name, _ in fields]
        assert len(got) == len(fields)
        for index, (name, field) in enumerate(fields):
            key = index if name is None else name
            same(got[key], wanted[key], field)
    else:
        assert (got.dtype, got.shape) == (type_spec.dtype, type_spec.shape)
        np.testing.assert_array_equal(got, wanted)


def same_all(got, wanted, type_spec):
    """Checks lists of values."""
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        same(one, other, type_spec)


def added(values, type_spec):
    """Sums values of a type in NumPy."""
    if isinstance(type_spec, tff.StructType):
        fields = tff.structure.to_elements(type_spec)
        keys = [index if name is None else name for index, (name, _) in enumerate(fields)]
        sums = [
            added([value[key] for value in values], field) for key, (_, field) in zip(keys, fields)
        ]
        return sums if all(name is None for name, _ in fields) else dict(zip(keys, sums))
    total = np.sum([np.asarray(value).astype(np.complex64) for value in values], axis=0)
    return total if type_spec.dtype.kind == "c" else total.real


SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=10)
SEEDS = st.integers(0, 2**31)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(member=types([np.bool_, *NUMBERS]), sizes=SIZES, seed=SEEDS)
def test_values_pass_every_placement_unchanged(member, sizes, seed):
    generator = np.random.default_rng(seed)
    server = random_value(member, generator)
    clients = [random_value(member, generator) for _ in sizes]
    data = [[random_value(member, generator) for _ in range(size)] for size in sizes]
    computation = tff.federated_computation(
        lambda server, clients, data, sequence: (
            server,
            clients,
            data,
            sequence,
            tff.federated_zip((clients, tff.federated_broadcast(server))),
        ),
        tff.FederatedType(member, tff.SERVER),
        tff.FederatedType(member, tff.CLIENTS),
        tff.FederatedType(tff.SequenceType(member), tff.CLIENTS),
        tff.SequenceType(member),
    )
    got = computation(server, clients, data, data[-1])
    same(got[0], server, member)
    same_all(got[1], clients, member)
    assert len(got[2]) == len(data)
    for one, other in zip(got[2], data):
        same_all(one, other, member)
    same_all(got[3], data[-1], member)
    same_all([pair[0] for pair in got[4]], clients, member)
    same_all([pair[1] for pair in got[4]], [server] * len(clients), member)


@pytest.mark.parametrize("debug_mode", [False, True])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(member=types(NUMBERS), sizes=SIZES, seed=SEEDS)
def test_sums_of_any_type_equal_numpy(debug_mode, member, sizes, seed):
    generator = np.random.default_rng(seed)
    data = [[random_value(member, generator) for _ in range(size)] for size in sizes]
    data[0] = [random_value(member, generator)]  # The sum of nothing has no shape in NumPy.
    clients = [random_value(member, generator) for _ in sizes]
    add_up = tff.federated_computation(
        lambda values: tff.sequence_sum(values), tff.SequenceType(member)
    )
    computation = tff.federated_computation(
        lambda clients, data: (
            tff.federated_sum(clients),
            tff.federated_sum(tff.federated_map(add_up, data)),
        ),
        tff.FederatedType(member, tff.CLIENTS),
        tff.FederatedType(tff.SequenceType(member), tff.CLIENTS),
    )
    context = federated.create_local_python_execution_context(debug=debug_mode)
    with tff.framework.get_context_stack().install(context):
        got = computation(clients, data)
    same(got[0], added(clients, member), member)
    same(got[1], added([value for client in data for value in client], member), member)
