"""Walks TFF's building blocks and evaluates them with JAX.

Under `jax.jit` the walk happens once, while the program is traced: lambdas, blocks and selections
cost nothing at run time, `federated_map` becomes one loop over the clients of a device,
`sequence_reduce` one loop over the batches of a client, aggregations one reduction (and one
collective where the clients are spread over several devices). In the debug mode the same walk runs
on concrete arrays with Python loops, so that an error has a place.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from helpers.federated import frontend, hlo
from helpers.federated.values import (
    AllEqual,
    MappedSequence,
    PerClient,
    SequenceValue,
    Zipped,
    collector_for,
    contains_sequence,
    map_tensors,
    zip_clients,
)

blocks = frontend.framework

# Who runs an intrinsic that this runtime does not cover; for those not named, the native context.
_OTHER_CONTEXTS = {
    "federated_secure_sum": frontend.TEST_CONTEXT,
    "federated_secure_sum_bitwidth": frontend.TEST_CONTEXT,
    "federated_secure_modular_sum": frontend.TEST_CONTEXT,
    "federated_secure_select": frontend.TEST_CONTEXT,
}


class UnsupportedIntrinsicError(NotImplementedError):
    """The computation uses an intrinsic of TFF that this runtime does not cover."""


class NoClientsError(ValueError):
    """A value is placed at the clients, but nothing says how many clients there are."""


@dataclasses.dataclass(frozen=True)
class Cohort:
    """The clients of one call, as one device sees them.

    Attributes:
      capacity: Number of client slots on this device (static).
      local: int32 scalar, number of slots in use on this device.
      total: int32 scalar, number of clients on all devices.
      axis_name: Name of the device axis, or None on a single device.
    """

    capacity: int
    local: jax.Array
    total: jax.Array
    axis_name: str | None

    def mask(self, like: jax.Array) -> jax.Array:
        """Returns which slots are in use, as bool `[capacity, 1, ...]` of the rank of `like`."""
        in_use = jnp.arange(self.capacity, dtype=jnp.int32) < self.local
        return in_use.reshape((self.capacity,) + (1,) * (like.ndim - 1))

    def reduce(self, array, identity, reducer: Callable, collective: Callable):
        """Reduces `[capacity, ...]` to `[...]` over the clients of all devices."""
        array = jnp.where(self.mask(array), array, jnp.asarray(identity, array.dtype))
        local = reducer(array, axis=0)
        return local if self.axis_name is None else collective(local, self.axis_name)

    def sum(self, array, dtype=None):
        """Sums `[capacity, ...]` over all clients; `dtype` is the accumulator's."""
        array = array.astype(dtype or array.dtype)
        return self.reduce(array, 0, lambda x, axis: jnp.sum(x, axis=axis, dtype=x.dtype), lax.psum)


class FusedLoops:
    """Loops that become part of the XLA program, and leaves that do."""

    def __call__(self, count, body: Callable, initial, what: str):
        """Repeats `carry = body(index, carry)`; see `lax.fori_loop`."""
        del what
        return lax.fori_loop(jnp.int32(0), count, body, initial)

    def run_leaf(self, leaf: hlo.Leaf, arguments):
        """Calls a leaf."""
        return leaf(*arguments)


class DebugLoops:
    """Loops in Python that know where they are, and leaves that are watched for NaN."""

    def __init__(self):
        self._place: list[tuple[str, int]] = []

    def __call__(self, count, body: Callable, initial, what: str):
        """Repeats `carry = body(index, carry)`, remembering `what` and the index."""
        carry = initial
        for index in range(int(count)):
            with self._at(what, index):
                carry = body(index, carry)
        return carry

    def run_leaf(self, leaf: hlo.Leaf, arguments):
        """Calls a leaf and raises where it turns finite numbers into a NaN, or fails."""
        try:
            results = jax.block_until_ready(leaf(*arguments))
        except Exception as error:
            raise RuntimeError(f"{leaf.name} failed at {self._describe()}: {error}") from error
        if any(_has_nan(x) for x in results) and not any(_has_nan(x) for x in arguments):
            raise FloatingPointError(
                f"the first NaN arises at {self._describe()}, in the JAX computation {leaf.name}"
            )
        return results

    @contextlib.contextmanager
    def _at(self, what: str, index: int):
        self._place.append((what, index))
        try:
            yield
        finally:
            self._place.pop()

    def _describe(self) -> str:
        return ", ".join(f"{what} {index}" for what, index in self._place) or "the server"


def _has_nan(array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact) and bool(jnp.isnan(array).any())


class Evaluator:
    """Evaluates building blocks for one call."""

    def __init__(self, loops, cohort: Cohort | None):
        """Prepares a walk.

        Args:
          loops: `FusedLoops` or `DebugLoops`.
          cohort: The clients of the call, or None where there are none.
        """
        self._loops = loops
        self._maybe_cohort = cohort

    @property
    def _cohort(self) -> Cohort:
        if self._maybe_cohort is None:
            raise NoClientsError(
                "the computation places a value at the clients, but no argument says how many "
                "clients there are; pass default_num_clients=... when creating the context"
            )
        return self._maybe_cohort

    def evaluate(self, block, names: dict[str, object]):
        """Returns the value of a building block.

        Args:
          block: Any of `tff.framework`'s building blocks.
          names: Values of the references that are in scope.
        """
        if isinstance(block, blocks.Reference):
            return names[block.name]
        if isinstance(block, blocks.Selection):
            return self.evaluate(block.source, names)[block.as_index()]
        if isinstance(block, blocks.Struct):
            return tuple(self.evaluate(part, names) for _, part in frontend.fields(block))
        if isinstance(block, blocks.Call):
            function = self.evaluate(block.function, names)
            if block.argument is None:
                return function(None)
            return function(self.evaluate(block.argument, names))
        if isinstance(block, blocks.Lambda):
            return lambda argument: self.evaluate(
                block.result, {**names, block.parameter_name: argument}
            )
        if isinstance(block, blocks.Block):
            names = dict(names)
            for name, local in block.locals:
                names[name] = self.evaluate(local, names)
            return self.evaluate(block.result, names)
        if isinstance(block, blocks.CompiledComputation):
            return self._leaf(frontend.leaf_proto(block))
        if isinstance(block, blocks.Intrinsic):
            return self._intrinsic(block)
        if isinstance(block, blocks.Literal):
            return jnp.asarray(block.value, block.type_signature.dtype)
        raise UnsupportedIntrinsicError(
            f"this runtime does not evaluate {type(block).__name__} building blocks: {block}"
        )

    def result(self, value, type_spec):
        """Turns an evaluated value into arrays that a jitted function can return.

        Args:
          value: Value of the whole computation.
          type_spec: Its TFF type.
        """
        if isinstance(type_spec, frontend.FederatedType):
            if type_spec.placement is frontend.CLIENTS:
                if type_spec.all_equal:
                    return self.result(value.at(0), type_spec.member)
                return self._stack(value, type_spec.member)
            return self.result(value, type_spec.member)
        if isinstance(type_spec, frontend.StructType):
            parts = zip(value, frontend.fields(type_spec), strict=True)
            return tuple(self.result(part, field) for part, (_, field) in parts)
        if isinstance(type_spec, frontend.SequenceType):
            return self._store(value, type_spec)
        if isinstance(type_spec, frontend.FunctionType):
            raise UnsupportedIntrinsicError(
                f"a computation that returns a function ({type_spec}) has no value to fetch"
            )
        return jnp.asarray(value, type_spec.dtype)

    def _leaf(self, proto) -> Callable:
        kind = proto.WhichOneof("computation")
        if kind != "xla":
            raise hlo.UnsupportedLeafError(
                f"a {kind} computation cannot run in the XLA runtime: {frontend.NATIVE_CONTEXT} "
                "runs TensorFlow computations; write it with tff.jax.computation to run it here"
            )
        leaf = hlo.load_leaf(proto.xla.hlo_module.value)
        has_parameter = proto.xla.HasField("parameter")
        parameter, result = proto.xla.parameter, proto.xla.result

        def call(argument):
            arguments = []
            if has_parameter:
                _bind(parameter, argument, arguments)
            ordered = [array for _, array in sorted(arguments, key=lambda pair: pair[0])]
            return _unbind(result, self._loops.run_leaf(leaf, ordered))

        return call

    def _intrinsic(self, block) -> Callable:
        method = self._INTRINSICS.get(block.uri)
        if method is None:
            context = _OTHER_CONTEXTS.get(block.uri, frontend.NATIVE_CONTEXT)
            raise UnsupportedIntrinsicError(
                f"the XLA runtime does not cover {block.uri}; {context} runs it "
                "(for computations whose leaves are TensorFlow)"
            )
        type_spec = block.type_signature
        return lambda argument: method(self, argument, type_spec)

    # Client values.

    def _map(self, argument, type_spec):
        function, clients = argument
        if isinstance(clients, AllEqual):
            return AllEqual(function(clients.value))
        member_type = type_spec.result.member
        return PerClient(self._collect(lambda i: function(clients.at(i)), member_type))

    def _collect(self, value_of: Callable, member_type):
        """Runs a function for each client and stacks what it returns."""
        cohort = self._cohort
        example = None
        if contains_sequence(member_type):
            example = self._example(value_of)
        collector = collector_for(member_type, cohort.capacity, example)
        buffers = self._loops(
            cohort.local,
            lambda i, kept: collector.write(kept, i, value_of(i), self._loops),
            collector.empty(),
            "client",
        )
        return collector.finish(buffers)

    def _example(self, value_of: Callable):
        """Traces one client's value, for the storage of the sequences in it."""
        seen = []
        loops, self._loops = self._loops, FusedLoops()
        try:
            jax.eval_shape(lambda i: seen.append(value_of(i)), jnp.int32(0))
        finally:
            self._loops = loops
        return seen[0]

    def _stack(self, clients, member_type):
        if isinstance(clients, PerClient):
            return clients.stacked
        if isinstance(clients, Zipped):
            parts = zip(clients.parts, frontend.fields(member_type), strict=True)
            return tuple(self._stack(part, field) for part, (_, field) in parts)
        return self._collect(clients.at, member_type)

    def _zip_at_clients(self, argument, type_spec):
        del type_spec
        return zip_clients(argument)

    def _sum(self, clients, type_spec):
        return map_tensors(self._cohort.sum, self._stack(clients, type_spec.result.member))

    def _min(self, clients, type_spec):
        def smallest(array):
            return self._cohort.reduce(array, _limits(array.dtype)[1], jnp.min, lax.pmin)

        return map_tensors(smallest, self._stack(clients, type_spec.result.member))

    def _max(self, clients, type_spec):
        def largest(array):
            return self._cohort.reduce(array, _limits(array.dtype)[0], jnp.max, lax.pmax)

        return map_tensors(largest, self._stack(clients, type_spec.result.member))

    def _mean(self, clients, type_spec):
        def mean(array):
            accumulator = _accumulator(array.dtype)
            total = self._cohort.sum(array, accumulator)
            return (total / self._cohort.total.astype(accumulator)).astype(array.dtype)

        return map_tensors(mean, self._stack(clients, type_spec.result.member))

    def _weighted_mean(self, argument, type_spec):
        value_type, weight_type = (
            field.member for _, field in frontend.fields(type_spec.parameter)
        )
        weights = self._stack(argument[1], weight_type)

        def mean(array):
            accumulator = _accumulator(array.dtype)
            weight = weights.astype(accumulator)
            total_weight = self._cohort.sum(weight)
            weight = weight.reshape(weight.shape + (1,) * (array.ndim - 1))
            # A client without weight has no say, whatever it holds: 0 times NaN would be NaN.
            product = jnp.where(weight == 0, 0, weight * array.astype(accumulator))
            total = self._cohort.sum(product)
            # No weight at all leaves nothing to average. Zero is returned: the neutral element of
            # the sums before the division, and for an average of updates "leave the model alone".
            nothing = total_weight == 0
            quotient = total / jnp.where(nothing, 1, total_weight)
            return jnp.where(nothing, 0, quotient).astype(array.dtype)

        return map_tensors(mean, self._stack(argument[0], value_type))

    def _aggregate(self, argument, type_spec):
        clients, zero, accumulate, merge, report = argument
        del type_spec
        cohort = self._cohort
        total = self._loops(
            cohort.local, lambda i, kept: accumulate((kept, clients.at(i))), zero, "client"
        )
        if cohort.axis_name is not None:
            gathered = map_tensors(lambda x: lax.all_gather(x, cohort.axis_name), total)
            devices = lax.psum(1, cohort.axis_name)  # A constant: the size of the axis.
            total = map_tensors(lambda x: x[0], gathered)
            for device in range(1, devices):
                total = merge((total, map_tensors(lambda x, d=device: x[d], gathered)))
        return report(total)

    # Sequences.

    def _sequence_map(self, argument, type_spec):
        function, sequence = argument
        del type_spec
        return MappedSequence(sequence, function)

    def _sequence_reduce(self, argument, type_spec):
        sequence, zero, reduce = argument
        del type_spec
        return self._loops(
            sequence.length, lambda i, kept: reduce((kept, sequence.at(i))), zero, "batch"
        )

    def _sequence_sum(self, sequence, type_spec):
        zero = _zeros(type_spec.result)
        return self._loops(
            sequence.length,
            lambda i, kept: map_tensors(jnp.add, kept, sequence.at(i)),
            zero,
            "batch",
        )

    def _store(self, sequence, type_spec):
        """Computes the elements of a sequence that is part of the result."""
        if isinstance(sequence, SequenceValue):
            return sequence
        collector = collector_for(type_spec.element, sequence.capacity)
        elements = self._loops(
            sequence.length,
            lambda i, kept: collector.write(kept, sequence.start + i, sequence.at(i), self._loops),
            collector.empty(),
            "batch",
        )
        return SequenceValue(collector.finish(elements), sequence.start, sequence.length)

    _INTRINSICS: ClassVar[dict[str, Callable]] = {
        "federated_aggregate": _aggregate,
        "federated_apply": lambda self, argument, _: argument[0](argument[1]),
        "federated_broadcast": lambda self, value, _: AllEqual(value),
        "federated_eval_at_clients": lambda self, function, _: AllEqual(function(None)),
        "federated_eval_at_server": lambda self, function, _: function(None),
        "federated_map": _map,
        "federated_map_all_equal": _map,
        "federated_max": _max,
        "federated_mean": _mean,
        "federated_min": _min,
        "federated_sum": _sum,
        "federated_value_at_clients": lambda self, value, _: AllEqual(value),
        "federated_value_at_server": lambda self, value, _: value,
        "federated_weighted_mean": _weighted_mean,
        "federated_zip_at_clients": _zip_at_clients,
        "federated_zip_at_server": lambda self, value, _: value,
        "sequence_map": _sequence_map,
        "sequence_reduce": _sequence_reduce,
        "sequence_sum": _sequence_sum,
    }


def _bind(binding, value, arguments: list[tuple[int, jax.Array]]) -> None:
    """Lists the HLO parameters that a TFF argument fills, with their positions."""
    if binding.WhichOneof("binding") == "tensor":
        arguments.append((binding.tensor.index, value))
    else:
        for part, field in zip(binding.struct.element, value, strict=True):
            _bind(part, field, arguments)


def _unbind(binding, results):
    """Arranges an HLO module's flat results as the TFF result says."""
    if binding.WhichOneof("binding") == "tensor":
        return results[binding.tensor.index]
    return tuple(_unbind(part, results) for part in binding.struct.element)


def _zeros(type_spec):
    if isinstance(type_spec, frontend.StructType):
        return tuple(_zeros(field) for _, field in frontend.fields(type_spec))
    return jnp.zeros(type_spec.shape, type_spec.dtype)


def _limits(dtype):
    """Returns the smallest and the largest value of a real dtype."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf, np.inf
    info = jnp.iinfo(dtype)
    return info.min, info.max


def _accumulator(dtype):
    """Returns the dtype to average in: half precision loses small terms of a long sum."""
    return jnp.promote_types(dtype, jnp.float32)
