"""How a TFF value looks while its computation is traced by JAX.

| TFF type                 | value here                                                          |
|--------------------------|---------------------------------------------------------------------|
| tensor                   | a JAX array (a tracer while the program is built)                   |
| struct                   | a tuple; names live in the type only                                |
| function                 | a Python callable of one value                                      |
| sequence                 | `SequenceValue` or `MappedSequence`                                 |
| placed at the server     | the member value                                                    |
| placed at the clients    | `AllEqual`, `PerClient` or `Zipped`                                 |

Sequences are ragged, not padded: the elements of all clients stand behind one another along one
axis, and each client knows where its own begin and how many there are. A cohort with one large and
many small clients therefore takes the memory of its data, and no padding is ever computed on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from helpers.federated import frontend


def take(array: jax.Array, index) -> jax.Array:
    """Returns `array[index]` along the leading axis; the index may be traced."""
    return lax.dynamic_index_in_dim(array, index, axis=0, keepdims=False)


def put(array: jax.Array, index, value: jax.Array) -> jax.Array:
    """Returns `array` with `array[index]` replaced; the index may be traced."""
    return lax.dynamic_update_index_in_dim(array, value, index, axis=0)


def map_tensors(function: Callable, *values):
    """Applies a function to the arrays of equally nested tuples."""
    if isinstance(values[0], tuple):
        return tuple(map_tensors(function, *parts) for parts in zip(*values, strict=True))
    return function(*values)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class SequenceValue:
    """One sequence, or (`start` and `length` stacked) one a client, over shared storage.

    Attributes:
      elements: Nested tuples of arrays `[capacity, ...]`.
      start: int32 index of the first element.
      length: int32 number of elements.
      disjoint: Whether each client has room of its own in the storage. It has in the data of a
        cohort; a sequence that was broadcast is stored once, and all clients begin at its start.
    """

    elements: object
    start: jax.Array
    length: jax.Array
    disjoint: bool = False

    @property
    def capacity(self) -> int:
        """Number of elements there is storage for."""
        return jax.tree_util.tree_leaves(self.elements)[0].shape[0]

    def at(self, index):
        """Returns element `index` of this sequence."""
        return map_tensors(lambda array: take(array, self.start + index), self.elements)

    def tree_flatten(self):
        """Lists the arrays, for JAX."""
        return (self.elements, self.start, self.length), self.disjoint

    @classmethod
    def tree_unflatten(cls, disjoint, children):
        """Puts the arrays together again, for JAX."""
        return cls(*children, disjoint)


@dataclasses.dataclass(frozen=True)
class MappedSequence:
    """A function applied to each element of a sequence, when the element is asked for."""

    source: SequenceValue | MappedSequence
    function: Callable

    @property
    def start(self):
        """Index of the first element in storage."""
        return self.source.start

    @property
    def length(self):
        """Number of elements."""
        return self.source.length

    @property
    def capacity(self) -> int:
        """Number of elements there is storage for."""
        return self.source.capacity

    @property
    def disjoint(self) -> bool:
        """Whether each client has room of its own in the storage."""
        return self.source.disjoint

    def at(self, index):
        """Returns the function of element `index`."""
        return self.function(self.source.at(index))


@dataclasses.dataclass(frozen=True)
class AllEqual:
    """The same member value at every client."""

    value: object

    def at(self, _):
        """Returns the value, whichever client asks."""
        return self.value


@dataclasses.dataclass(frozen=True)
class PerClient:
    """A member value for each client.

    Attributes:
      stacked: The member value with `[capacity, ...]` instead of `[...]` for its arrays and
        `[capacity]` for the starts and lengths of its sequences.
    """

    stacked: object

    def at(self, client):
        """Returns the member value of one client."""
        return _unstack(self.stacked, client)


@dataclasses.dataclass(frozen=True)
class Zipped:
    """A struct of client values seen as a client value of a struct; nothing is copied."""

    parts: tuple

    def at(self, client):
        """Returns the tuple of one client's member values."""
        return tuple(part.at(client) for part in self.parts)


CLIENT_VALUES = (AllEqual, PerClient, Zipped)


def zip_clients(value):
    """Turns nested tuples of client values into one client value."""
    if isinstance(value, CLIENT_VALUES):
        return value
    parts = tuple(zip_clients(part) for part in value)
    if all(isinstance(part, AllEqual) for part in parts):
        return AllEqual(tuple(part.value for part in parts))
    return Zipped(parts)


def _unstack(stacked, client):
    if isinstance(stacked, tuple):
        return tuple(_unstack(part, client) for part in stacked)
    if isinstance(stacked, SequenceValue):
        return SequenceValue(
            stacked.elements,
            take(stacked.start, client),
            take(stacked.length, client),
            stacked.disjoint,
        )
    return take(stacked, client)


class TensorCollector:
    """Gathers one array a client (or an element) into an array with a leading axis."""

    def __init__(self, type_spec, capacity: int):
        self._shape = (capacity, *type_spec.shape)
        self._dtype = type_spec.dtype

    def empty(self):
        """Returns the buffer to start from."""
        return jnp.zeros(self._shape, self._dtype)

    def write(self, buffer, index, value, loop):
        """Returns the buffer with one more value in it."""
        del loop  # Only sequences need one.
        return put(buffer, index, jnp.asarray(value, self._dtype))

    def finish(self, buffer):
        """Returns what was gathered."""
        return buffer


class StructCollector:
    """Gathers a struct field by field."""

    def __init__(self, fields):
        self._fields = fields

    def empty(self):
        """Returns the buffers to start from."""
        return tuple(field.empty() for field in self._fields)

    def write(self, buffers, index, value, loop):
        """Returns the buffers with one more value in them."""
        return tuple(
            field.write(buffer, index, part, loop)
            for field, buffer, part in zip(self._fields, buffers, value, strict=True)
        )

    def finish(self, buffers):
        """Returns what was gathered."""
        return tuple(
            field.finish(buffer) for field, buffer in zip(self._fields, buffers, strict=True)
        )


class SequenceCollector:
    """Gathers one sequence a client.

    A sequence that was only passed on keeps its storage: its start and length are all there is to
    gather. One with a function on it is computed into storage of the same layout, or where the
    clients share the source, and the function may tell them apart, into equal parts for each.
    """

    def __init__(self, type_spec, capacity: int, example):
        self._clients = capacity
        self._shared = example.elements if isinstance(example, SequenceValue) else None
        self._disjoint = example.disjoint
        self._part = example.capacity
        if self._shared is None:
            parts = 1 if self._disjoint else capacity
            self._elements = collector_for(type_spec.element, parts * self._part)

    def empty(self):
        """Returns the buffers to start from."""
        positions = jnp.zeros((self._clients,), jnp.int32)
        storage = () if self._shared is not None else self._elements.empty()
        return positions, positions, storage

    def write(self, buffers, index, value, loop):
        """Returns the buffers with one more sequence in them."""
        starts, lengths, storage = buffers
        start = value.start
        if self._shared is None:
            if not self._disjoint:
                start = jnp.int32(index * self._part)
            storage = loop(
                value.length,
                lambda j, kept: self._elements.write(kept, start + j, value.at(j), loop),
                storage,
                "batch",
            )
        return put(starts, index, start), put(lengths, index, value.length), storage

    def finish(self, buffers):
        """Returns what was gathered."""
        starts, lengths, storage = buffers
        if self._shared is not None:
            return SequenceValue(self._shared, starts, lengths, self._disjoint)
        return SequenceValue(self._elements.finish(storage), starts, lengths, disjoint=True)


def collector_for(type_spec, capacity: int, example=None):
    """Returns a collector of values of a TFF type.

    Args:
      type_spec: Type of one value: tensors, structs and sequences.
      capacity: Number of values there is room for.
      example: A value of that type, needed where it holds sequences: their storage cannot be told
        from the type.
    """
    if isinstance(type_spec, frontend.TensorType):
        return TensorCollector(type_spec, capacity)
    if isinstance(type_spec, frontend.StructType):
        fields = frontend.fields(type_spec)
        parts = example if example is not None else [None] * len(fields)
        return StructCollector(
            [collector_for(field, capacity, part) for (_, field), part in zip(fields, parts)]
        )
    return SequenceCollector(type_spec, capacity, example)


def contains_sequence(type_spec) -> bool:
    """Tells whether a member type holds a sequence anywhere."""
    if isinstance(type_spec, frontend.StructType):
        return any(contains_sequence(field) for _, field in frontend.fields(type_spec))
    return isinstance(type_spec, frontend.SequenceType)
