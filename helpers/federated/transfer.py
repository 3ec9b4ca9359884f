"""Moves values between Python and the devices: arguments in, results out.

Arguments are checked against their TFF type here, before anything runs, and every message says
which client, which batch and which field. Arrays of clients get a leading axis with a slot a
client; the batches of all clients stand behind one another (see `helpers.federated.values`). The
sizes of both axes are rounded up to a few steps an octave, so that cohorts of similar size share
one compiled program; the loops stop at the true counts and never touch the room that is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from helpers.federated import frontend
from helpers.federated.values import SequenceValue

# XLA's CPU client adopts host memory without a copy where it starts at a multiple of this.
_ALIGNMENT = 64


def round_up(count: int) -> int:
    """Rounds a size up to 1 to 8 exactly, then to one of four steps an octave (10, 12, 14, 16 ...).

    Args:
      count: Number of slots needed, at least 0.

    Returns:
      A size that is at least `count`, at least 1 and at most a quarter more.
    """
    if count <= 8:
        return max(count, 1)
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step


@dataclasses.dataclass(frozen=True)
class ClientLayout:
    """Where the clients of a cohort live.

    Clients keep their order and are split into contiguous, equally large groups, one a device.

    Attributes:
      num_clients: Size of the cohort.
      num_devices: Number of devices in use, at most the number of clients.
    """

    num_clients: int
    num_devices: int

    @property
    def counts(self) -> np.ndarray:
        """Number of clients on each device, int32 `[num_devices]`."""
        each, extra = divmod(self.num_clients, self.num_devices)
        return np.asarray([each + (d < extra) for d in range(self.num_devices)], np.int32)

    @property
    def capacity(self) -> int:
        """Number of client slots on each device."""
        return round_up(-(-self.num_clients // self.num_devices))

    def groups(self) -> list[range]:
        """Indices of the clients on each device."""
        ends = np.cumsum(self.counts).tolist()
        return [range(end - count, end) for end, count in zip(ends, self.counts.tolist())]

    def slots(self) -> np.ndarray:
        """Slot of each client on the axis that runs over all devices, int `[num_clients]`."""
        return np.concatenate(
            [d * self.capacity + np.arange(count) for d, count in enumerate(self.counts)]
        )


@dataclasses.dataclass(frozen=True)
class PlacedArgument:
    """An argument that is on the devices in the runtime's own layout."""

    value: object
    layout: ClientLayout | None


class DeviceValue(frontend.TypedObject):
    """A value that was put on the devices once, to be passed to any number of calls.

    Made by the context's `device_put`. Passing it spares the checks and the copy that a Python
    value needs at each call, which is what a benchmark or a long run with the same data wants.
    """

    def __init__(self, type_signature, placed: PlacedArgument):
        self._type_signature = type_signature
        self.placed = placed

    @property
    def type_signature(self):
        """TFF type of the value."""
        return self._type_signature

    def __repr__(self) -> str:
        return f"DeviceValue({self._type_signature})"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in an argument a value stands; it becomes text only when a message needs it."""

    outer: Place | None
    label: str
    index: int | None = None

    def __str__(self) -> str:
        own = self.label if self.index is None else f"{self.label} {self.index}"
        return own if self.outer is None else f"{self.outer}, {own}"


_ARGUMENT = Place(None, "argument")


def cohort_size(value, type_spec, place: Place = _ARGUMENT) -> int | None:
    """Tells how many clients an argument holds values for.

    Args:
      value: The argument.
      type_spec: Its TFF type.
      place: What the argument is called, for messages.

    Returns:
      The number of clients, or None where nothing in the argument depends on it.

    Raises:
      TypeError: A value placed at the clients is not a list or tuple.
      ValueError: A cohort is empty, or two arguments hold cohorts of different sizes.
    """
    sizes = list(_cohort_sizes(value, type_spec, place))
    for other_place, other in sizes[1:]:
        if other != sizes[0][1]:
            raise ValueError(
                f"cohorts of different sizes: {sizes[0][0]} holds {sizes[0][1]} clients, "
                f"{other_place} holds {other}; pass one value a client in both"
            )
    return sizes[0][1] if sizes else None


def _cohort_sizes(value, type_spec, place):
    if isinstance(value, DeviceValue):
        layout = value.placed.layout
        if layout is not None:
            yield place, layout.num_clients
    elif isinstance(type_spec, frontend.FederatedType):
        if type_spec.placement is frontend.CLIENTS and not type_spec.all_equal:
            if not isinstance(value, (list, tuple)):
                raise TypeError(
                    f"{place} is placed at the clients, type {type_spec}: expected a list with one "
                    f"value a client, given {_name(value)}"
                )
            if not value:
                raise ValueError(
                    f"{place} is an empty cohort: {type_spec} needs at least one client"
                )
            yield place, len(value)
    elif isinstance(type_spec, frontend.StructType):
        for part, (name, field), where in _parts(value, type_spec, place):
            del name
            yield from _cohort_sizes(part, field, where)


def ingest(value, type_spec, layout: ClientLayout | None, place: Place = _ARGUMENT):
    """Checks an argument against its type and lays it out for the runtime.

    Args:
      value: The argument: arrays and scalars; structs as dict (fields in any order), tuple, list,
        attrs class, NamedTuple or `tff.structure.Struct`; sequences as any iterable or a
        `tf.data.Dataset`; values at the clients as a list with one member a client.
      type_spec: Its TFF type.
      layout: Where the clients live, or None where the argument has none.
      place: What the argument is called, for messages.

    Returns:
      Nested tuples of arrays, with a `SequenceValue` for each sequence.

    Raises:
      TypeError: A dtype, shape, field or container does not fit the type.
      ValueError: A `DeviceValue` was put on other devices than this call uses.
    """
    if isinstance(value, DeviceValue):
        return _reuse(value, type_spec, layout, place)
    if isinstance(type_spec, frontend.FederatedType):
        if type_spec.placement is frontend.CLIENTS and not type_spec.all_equal:
            return _stack_clients(value, type_spec.member, layout, place)
        return ingest(value, type_spec.member, layout, place)
    if isinstance(type_spec, frontend.StructType):
        return tuple(
            ingest(part, field, layout, where)
            for part, (_, field), where in _parts(value, type_spec, place)
        )
    if isinstance(type_spec, frontend.SequenceType):
        rows = _elements(value, type_spec.element, place)
        storage = _store([rows], type_spec.element, round_up(len(rows)))
        return SequenceValue(storage, np.int32(0), np.int32(len(rows)))
    if isinstance(type_spec, frontend.TensorType):
        return to_array(value, type_spec, place)
    raise TypeError(
        f"{place} has type {type_spec}, which the XLA runtime cannot take as an argument"
    )


def _reuse(value: DeviceValue, type_spec, layout, place):
    if not type_spec.is_assignable_from(value.type_signature):
        raise TypeError(
            f"{place}: expected type {type_spec}, given a DeviceValue of {value.type_signature}"
        )
    if value.placed.layout is not None and value.placed.layout != layout:
        raise ValueError(
            f"{place} was put on {value.placed.layout.num_devices} devices, this context uses "
            f"{layout.num_devices}; call device_put of the context that runs the computation"
        )
    return value.placed.value


def _stack_clients(value, member_type, layout: ClientLayout, place: Place):
    """Stacks the member values of all clients along one axis with a slot a client."""
    if isinstance(member_type, frontend.StructType):
        columns = [
            _parts(member, member_type, Place(place, "client", client))
            for client, member in enumerate(value)
        ]
        stacked = []
        for index, (name, field) in enumerate(frontend.fields(member_type)):
            parts = [column[index][0] for column in columns]
            stacked.append(_stack_clients(parts, field, layout, _field(place, name, index)))
        return tuple(stacked)
    if isinstance(member_type, frontend.SequenceType):
        rows = [
            _elements(member, member_type.element, Place(place, "client", client))
            for client, member in enumerate(value)
        ]
        return _stack_sequences(rows, member_type.element, layout)
    if not isinstance(member_type, frontend.TensorType):
        raise TypeError(f"{place} has member type {member_type}, which the XLA runtime cannot take")
    arrays = [
        to_array(member, member_type, Place(place, "client", client))
        for client, member in enumerate(value)
    ]
    buffer = _empty((layout.num_devices * layout.capacity, *member_type.shape), member_type.dtype)
    for device, group in enumerate(layout.groups()):
        first = device * layout.capacity
        _fill(buffer[first : first + layout.capacity], arrays[group.start : group.stop])
    return buffer


def _stack_sequences(rows: list[list], element_type, layout: ClientLayout) -> SequenceValue:
    lengths = [len(client_rows) for client_rows in rows]
    groups = layout.groups()
    capacity = round_up(max(sum(lengths[k] for k in group) for group in groups))
    slots = layout.num_devices * layout.capacity
    starts, counts = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    for device, group in enumerate(groups):
        start = 0
        for slot, client in enumerate(group, device * layout.capacity):
            starts[slot], counts[slot] = start, lengths[client]
            start += lengths[client]
    by_device = [[row for client in group for row in rows[client]] for group in groups]
    storage = _store(by_device, element_type, capacity)
    return SequenceValue(storage, starts, counts, disjoint=True)


def _store(by_device: list[list], element_type, capacity: int):
    """Copies flat rows of arrays into storage `[num_devices * capacity, ...]` an array."""
    buffers = []
    for index, leaf in enumerate(tensor_types(element_type)):
        buffer = _empty((len(by_device) * capacity, *leaf.shape), leaf.dtype)
        for device, rows in enumerate(by_device):
            part = buffer[device * capacity : (device + 1) * capacity]
            _fill(part, [row[index] for row in rows])
        buffers.append(buffer)
    return _pack(element_type, iter(buffers))


def _elements(value, element_type, place: Place) -> list[list]:
    """Lists the elements of a sequence, each as its flat arrays."""
    if hasattr(value, "as_numpy_iterator"):
        value = value.as_numpy_iterator()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(
            f"{place}: expected a sequence of {element_type} (list, tuple, generator or "
            f"tf.data.Dataset), given {_name(value)}"
        )
    rows = []
    for batch, element in enumerate(value):
        row: list = []
        _flatten(element, element_type, Place(place, "batch", batch), row)
        rows.append(row)
    return rows


def _flatten(value, type_spec, place: Place, row: list) -> None:
    if isinstance(type_spec, frontend.StructType):
        for part, (_, field), where in _parts(value, type_spec, place):
            _flatten(part, field, where, row)
    elif isinstance(type_spec, frontend.TensorType):
        row.append(to_array(value, type_spec, place))
    else:
        raise TypeError(
            f"{place} has type {type_spec}: a sequence can hold tensors and structs only"
        )


def tensor_types(type_spec) -> list:
    """Lists the tensor types in a type of tensors and structs, in order."""
    if isinstance(type_spec, frontend.StructType):
        return [leaf for _, field in frontend.fields(type_spec) for leaf in tensor_types(field)]
    return [type_spec]


def _pack(type_spec, arrays):
    if isinstance(type_spec, frontend.StructType):
        return tuple(_pack(field, arrays) for _, field in frontend.fields(type_spec))
    return next(arrays)


def _parts(value, type_spec, place: Place) -> list[tuple[object, tuple, str]]:
    """Matches the fields of a struct value to those of its type.

    Returns:
      For each field of the type, in its order: the value, `(name, type)` and what to call it.
    """
    fields = frontend.fields(type_spec)
    names = [name for name, _ in fields]
    values = _values_in_order(value, names, type_spec, place)
    return [
        (part, field, _field(place, field[0], index))
        for index, (part, field) in enumerate(zip(values, fields))
    ]


def _field(place: Place, name: str | None, index: int) -> Place:
    return Place(place, "field", index) if name is None else Place(place, f"field {name}")


def _values_in_order(value, names: list, type_spec, place: Place) -> list:
    """Lists the fields of a struct value in the order of its type's."""
    if isinstance(value, dict) and list(value) == names:
        return list(value.values())  # By far the most common: worth not going the long way.
    given = _fields_of(value)
    if given is None:
        raise TypeError(f"{place}: expected a struct {type_spec}, given {_name(value)}")
    given_names = [name for name, _ in given]
    if all(given_names) and all(names) and given:
        by_name = dict(given)
        missing = [name for name in names if name not in by_name]
        extra = [name for name in given_names if name not in set(names)]
        if missing or extra:
            problems = [f"field {name!r} is missing" for name in missing]
            problems += [f"field {name!r} is not in the type" for name in extra]
            raise TypeError(f"{place}: {', '.join(problems)}; expected the fields {names}")
        return [by_name[name] for name in names]
    if len(given) != len(names):
        raise TypeError(f"{place}: expected {len(names)} fields of {type_spec}, given {len(given)}")
    for name, (given_name, _) in zip(names, given):
        if given_name is not None and given_name != name:
            raise TypeError(f"{place}: expected the fields {names}, given {given_names}")
    return [part for _, part in given]


def _fields_of(value) -> list[tuple[str | None, object]] | None:
    """Lists the named or unnamed fields of a Python container, or None if it is not one."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, frontend.Struct):
        return list(frontend.fields(value))
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if attributes is not None:
        return [(attribute.name, getattr(value, attribute.name)) for attribute in attributes]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [(None, part) for part in value]
    return None


def to_array(value, type_spec, place: Place = _ARGUMENT) -> np.ndarray | jax.Array:
    """Converts a value to an array of exactly the type's dtype and shape.

    Python numbers are taken where the dtype holds them exactly enough (an int for any integer or
    float dtype it fits, a float for any float dtype); arrays may widen within their kind (int8 to
    int32), as in TFF, and never narrow or change kind.

    Args:
      value: Array, scalar, nested list of scalars or TensorFlow tensor.
      type_spec: `tff.TensorType`.
      place: What the value is called, for messages.

    Returns:
      The array; a JAX array stays where it is.

    Raises:
      TypeError: The dtype or the shape does not fit.
    """
    dtype, shape = type_spec.dtype, type_spec.shape
    if isinstance(value, (np.ndarray, jax.Array)) and value.dtype == dtype:
        array = value
    elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{place}: expected an array of {dtype}, given one of {value.dtype}; TFF has no type "
            "for JAX's typed keys: pass jax.random.key_data(key)"
        )
    elif isinstance(value, jax.Array):
        array = value.astype(_checked_dtype(value.dtype, dtype, place))
    else:
        array = _convert(value, dtype, place)
    if array.shape != shape:
        hint = ""
        if array.shape[1:] == shape[1:] and array.ndim == len(shape) and shape:
            hint = "; JAX needs batches of one size: drop or pad the last one (drop_remainder=True)"
        raise TypeError(
            f"{place}: expected shape {list(shape)} of {type_spec}, given {list(array.shape)}{hint}"
        )
    return array


def _convert(value, dtype, place) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{place}: expected an array of {dtype}, given a ragged list") from error
    if array.dtype == object or array.dtype.kind in "SUMm":
        raise TypeError(f"{place}: expected an array of {dtype}, given {_name(value)}")
    if isinstance(value, np.generic) or hasattr(value, "dtype"):
        return array.astype(_checked_dtype(array.dtype, dtype, place))
    return _from_python(array, dtype, place)


def _from_python(array: np.ndarray, dtype, place) -> np.ndarray:
    """Converts numbers that Python holds, whose dtype NumPy only guessed."""
    kind, wanted = _kind(array.dtype), _kind(dtype)
    allowed = {"b": "b", "i": "iufc", "u": "iufc", "f": "fc", "c": "c"}[kind]
    if wanted not in allowed and array.size:  # NumPy takes an empty list for floats.
        raise TypeError(f"{place}: expected {dtype}, given the Python value {array.tolist()!r}")
    if wanted in "iu" and array.size:
        info = jnp.iinfo(dtype)
        if array.min() < info.min or array.max() > info.max:
            raise TypeError(f"{place}: {array.tolist()!r} does not fit into {dtype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if wanted in "fc" and not np.array_equal(np.isfinite(converted), np.isfinite(array)):
        raise TypeError(f"{place}: {array.tolist()!r} does not fit into {dtype}")
    return converted


def _checked_dtype(given, wanted, place):
    """Returns the wanted dtype if every value of the given one fits, in the same kind."""
    given, wanted = np.dtype(given), np.dtype(wanted)
    if {_kind(given), _kind(wanted)} <= {"i", "u"}:
        fits = np.can_cast(given, wanted)
    else:
        fits = _kind(given) == _kind(wanted) and given.itemsize < wanted.itemsize
    if given != wanted and not fits:
        raise TypeError(
            f"{place}: expected dtype {wanted}, given {given}; convert it with .astype('{wanted}')"
        )
    return wanted


def _kind(dtype) -> str:
    """Returns NumPy's one-letter kind, with bfloat16 among the floats."""
    return "f" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


def _empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Allocates an array at an address that XLA's CPU client adopts without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _fill(buffer: np.ndarray, arrays: Sequence) -> None:
    """Copies arrays into the first slots and clears the rest."""
    if arrays:
        np.stack([np.asarray(array) for array in arrays], out=buffer[: len(arrays)])
    buffer[len(arrays) :] = 0


def _name(value) -> str:
    return f"{type(value).__name__} {value!r:.80}"


# Results.


def to_python(value, type_spec, layout: ClientLayout | None):
    """Turns the arrays of a result into the Python value that TFF users expect.

    Args:
      value: Nested tuples of arrays on the host, with `SequenceValue` for sequences.
      type_spec: TFF type of the result.
      layout: Where the clients live, or None.

    Returns:
      Arrays; lists for sequences and for values at the clients; for structs the Python containers
      of the type's annotation.
    """
    if isinstance(type_spec, frontend.FederatedType):
        if type_spec.placement is frontend.CLIENTS and not type_spec.all_equal:
            return [
                to_python(_slot(value, slot, layout.capacity), type_spec.member, layout)
                for slot in layout.slots().tolist()
            ]
        return to_python(value, type_spec.member, layout)
    if isinstance(type_spec, frontend.StructType):
        fields = frontend.fields(type_spec)
        struct = frontend.Struct(
            [
                (name, to_python(part, field, layout))
                for part, (name, field) in zip(value, fields, strict=True)
            ]
        )
        names = {name is None for name, _ in fields}
        # Python has no container with some fields named and some not.
        return struct if len(names) > 1 else frontend.type_to_py_container(struct, type_spec)
    if isinstance(type_spec, frontend.SequenceType):
        start, length = int(value.start), int(value.length)
        return [
            to_python(_row(value.elements, start + index), type_spec.element, layout)
            for index in range(length)
        ]
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _slot(value, slot: int, capacity: int):
    """Selects one client's member value; its sequences lie in the block of its device."""
    if isinstance(value, tuple):
        return tuple(_slot(part, slot, capacity) for part in value)
    if isinstance(value, SequenceValue):
        blocks = value.start.shape[0] // capacity
        storage = jax.tree_util.tree_leaves(value.elements)[0].shape[0] // blocks
        start = value.start[slot] + (slot // capacity) * storage
        return SequenceValue(value.elements, start, value.length[slot])
    return value[slot]


def _row(value, index: int):
    return tuple(_row(part, index) for part in value) if isinstance(value, tuple) else value[index]
