"""The door: an execution context of TFF that runs JAX computations as one XLA program.

TFF removed its own XLA runtime in 2023 and kept the front end that traces and serializes JAX
functions. This context takes the place of `tff.backends.xla`, under the names it had.
"""

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.federated import frontend, jax_internals, transfer
from helpers.federated.evaluate import Cohort, DebugLoops, Evaluator, FusedLoops, NoClientsError
from helpers.federated.interruptible import Worker
from helpers.federated.transfer import ClientLayout, DeviceValue, PlacedArgument
from helpers.federated.values import AllEqual, PerClient, SequenceValue
from helpers.jax_versions import shard_map

_AXIS = "clients"
_PROGRAMS_KEPT = 128


class UnsupportedTypeError(TypeError):
    """A computation's type holds a dtype or shape that JAX cannot represent as it is set up."""


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """What a context has built so far.

    Attributes:
      computations: Number of different computations seen (those still kept).
      traces: Number of times a computation was traced by JAX.
      compilations: Number of XLA programs compiled.
      calls: Number of calls made.
    """

    computations: int
    traces: int
    compilations: int
    calls: int


class XlaExecutionContext(frontend.framework.SyncContext):
    """Runs TFF computations whose leaves are JAX computations, in this process.

    A computation is traced once for each structure of its arguments, compiled into one XLA program
    and kept. No worker process is started and no event loop is used, so it works in scripts and
    inside Jupyter alike.
    """

    def __init__(
        self,
        *,
        default_num_clients: int = 0,
        devices: Sequence[jax.Device] | None = None,
        debug: bool = False,
        device_results: bool = False,
    ):
        """Makes a context; see `create_local_python_execution_context` for the arguments."""
        if default_num_clients < 0:
            raise ValueError(f"default_num_clients must be 0 or more, given {default_num_clients}")
        if devices is not None and not devices:
            raise ValueError("devices must hold at least one device, given an empty list")
        self._default_num_clients = default_num_clients
        self._devices = tuple(devices) if devices is not None else None
        self._debug = debug
        self._device_results = device_results
        self._worker = Worker()
        self._lock = threading.RLock()
        self._by_identity: dict[int, tuple[weakref.ref, _Program]] = {}
        self._by_content: collections.OrderedDict[bytes, _Program] = collections.OrderedDict()
        self._calls = 0
        self._traces = 0
        self._compilations = 0

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices that the clients are spread over."""
        return self._devices if self._devices is not None else tuple(jax.local_devices())

    def cache_info(self) -> CacheInfo:
        """Returns how much was traced and compiled so far."""
        return CacheInfo(len(self._by_content), self._traces, self._compilations, self._calls)

    def invoke(self, comp, arg):
        """Runs a computation; TFF calls this for `comp(...)`.

        Args:
          comp: A `tff.framework.ConcreteComputation`.
          arg: Its argument as TFF packs it, or None.

        Returns:
          The result as NumPy arrays (JAX arrays with `device_results=True`) in the containers of
          the result type.

        Raises:
          TypeError: The argument does not fit the type of the parameter.
          ValueError: A cohort is empty, or cohorts differ in size.
          NotImplementedError: The computation holds an intrinsic or a leaf that does not run here;
            the message names the context that runs it.
          FloatingPointError: In the debug mode, where the first NaN arises.
        """
        type_signature = comp.type_signature
        program = self._program(comp)
        program.check_types()
        layout = self._layout(arg, type_signature.parameter)
        argument = ()
        if type_signature.parameter is not None:
            argument = transfer.ingest(arg, type_signature.parameter, layout)
        self._calls += 1
        if self._debug:
            value = self._run_debug(program, argument, layout)
        else:
            value = self._run(program, argument, layout)
        return transfer.to_python(value, type_signature.result, layout)

    def device_put(self, value, type_spec) -> DeviceValue:
        """Checks a value and puts it on the devices, to be passed to any number of calls.

        Args:
          value: Anything that may be passed to a computation, such as the data of a cohort.
          type_spec: Its TFF type, such as the type of the computation's parameter or of one field.

        Returns:
          A value that a computation takes in place of the Python one.

        Raises:
          TypeError: The value does not fit the type.
          ValueError: A cohort is empty, or cohorts differ in size.
        """
        _check_type(type_spec)
        place = transfer.Place(None, "value")
        size = transfer.cohort_size(value, type_spec, place)
        layout = self._layout_of(size) if size is not None else None
        arrays = _owned(type_spec, transfer.ingest(value, type_spec, layout, place))
        if self._debug:
            return DeviceValue(type_spec, PlacedArgument(arrays, layout))
        mesh = self._mesh(layout)
        specs = _specs(type_spec, arrays)
        shardings = jax.tree_util.tree_map(
            lambda _, spec: self._sharding(mesh, spec), arrays, specs
        )
        placed = self._on_worker(lambda: jax.block_until_ready(jax.device_put(arrays, shardings)))
        return DeviceValue(type_spec, PlacedArgument(placed, layout))

    # What runs.

    def _program(self, comp) -> "_Program":
        """Returns the program of a computation; equal computations share one."""
        with self._lock:
            known = self._by_identity.get(id(comp))
            if known is not None and known[0]() is comp:
                return known[1]
            content = frontend.framework.serialize_computation(comp).SerializeToString(
                deterministic=True
            )
            program = self._by_content.pop(content, None) or _Program(comp)
            self._by_content[content] = program
            if len(self._by_content) > _PROGRAMS_KEPT:
                _, forgotten = self._by_content.popitem(last=False)
                self._by_identity = {
                    key: kept for key, kept in self._by_identity.items() if kept[1] is not forgotten
                }
            reference = weakref.ref(comp, functools.partial(_forget, self._by_identity, id(comp)))
            self._by_identity[id(comp)] = (reference, program)
            return program

    def _layout(self, arg, parameter_type) -> ClientLayout | None:
        size = None
        if parameter_type is not None:
            size = transfer.cohort_size(arg, parameter_type)
        if size is None:
            size = self._default_num_clients
        return self._layout_of(size) if size else None

    def _layout_of(self, size: int) -> ClientLayout:
        devices = 1 if self._debug else min(len(self.devices), size)
        return ClientLayout(size, devices)

    def _mesh(self, layout: ClientLayout | None) -> Mesh | None:
        if layout is None or layout.num_devices == 1:
            return None
        return Mesh(np.asarray(self.devices[: layout.num_devices]), (_AXIS,))

    def _sharding(self, mesh: Mesh | None, spec: P):
        if mesh is None:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return NamedSharding(mesh, spec)

    def _run(self, program: "_Program", argument, layout):
        counts = layout.counts if layout is not None else np.zeros((1,), np.int32)
        total = np.int32(layout.num_clients if layout is not None else 0)
        inputs = (counts, total, argument)
        leaves, structure = jax.tree_util.tree_flatten(inputs)
        key = (
            structure,
            tuple((leaf.shape, leaf.dtype) for leaf in leaves),
            (layout.num_devices, layout.capacity) if layout is not None else None,
            self.devices,
            # What else of JAX's configuration a trace depends on.
            jax.config.jax_enable_x64,
            jax.config.jax_default_matmul_precision,
        )
        with self._lock:
            known = program.executables.get(key)
            if known is None:
                shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
                shardings = self._shardings(program, inputs, layout)
                lowered = self._lower(program, structure.unflatten(shapes), layout, shardings)
                self._traces += 1
                executable = self._on_worker(lowered.compile)
                self._compilations += 1
                known = (executable, jax.tree_util.tree_leaves(shardings))
                program.executables[key] = known
        executable, shardings = known
        # JAX arrays may lie elsewhere: results of a call with another number of clients, hence of
        # devices, and values of the server that were put on the first device.
        leaves = [
            jax.device_put(leaf, sharding)
            if isinstance(leaf, jax.Array) and leaf.sharding != sharding
            else leaf
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return self._on_worker(lambda: self._fetch(executable(*structure.unflatten(leaves))))

    def _shardings(self, program: "_Program", inputs, layout):
        """Returns where a program reads each of its inputs, in their structure."""
        mesh = self._mesh(layout)
        specs = (P(_AXIS), P(), _specs(program.parameter_type, inputs[2]))
        return jax.tree_util.tree_map(lambda spec: self._sharding(mesh, spec), specs)

    def _on_worker(self, call):
        """Runs a call on the worker's thread under this thread's setting of 64-bit numbers."""
        x64 = jax.config.jax_enable_x64

        def with_x64():
            with jax_internals.enable_x64(x64):
                return call()

        return self._worker.run(with_x64)

    def _fetch(self, outputs):
        if self._device_results:
            return jax.block_until_ready(outputs)
        # A copy: the caller may write into results, and keeps nothing of the device alive.
        return jax.tree_util.tree_map(np.array, outputs)

    def _lower(self, program: "_Program", inputs, layout, shardings):
        """Traces the computation and lowers it to the module that XLA compiles."""
        mesh = self._mesh(layout)

        def run(counts, total, argument):
            cohort = None
            if layout is not None:
                axis = _AXIS if mesh is not None else None
                cohort = Cohort(layout.capacity, counts[0], total, axis)
            return program.evaluate(FusedLoops(), cohort, argument)

        run.__name__ = "tff_computation"  # Names the XLA module in profiles and dumps.
        if mesh is None:
            sharding = self._sharding(None, P())
            return jax.jit(run, in_shardings=sharding, out_shardings=sharding).lower(*inputs)
        in_specs = jax.tree_util.tree_map(lambda sharding: sharding.spec, shardings)
        out_specs = _result_specs(program.result_type)
        # Without the check, which does not know our primitive.
        shard = shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=False)
        return jax.jit(shard, in_shardings=shardings).lower(*inputs)

    def _run_debug(self, program: "_Program", argument, layout):
        argument = jax.device_put(argument, self.devices[0])
        cohort = None
        if layout is not None:
            count = jnp.int32(layout.num_clients)
            cohort = Cohort(layout.capacity, count, count, None)
        with jax.default_device(self.devices[0]):
            return self._fetch(program.evaluate(DebugLoops(), cohort, argument))


def _forget(by_identity: dict, key: int, reference) -> None:
    known = by_identity.get(key)
    if known is not None and known[0] is reference:
        del by_identity[key]


class _Program:
    """A computation, ready to be walked, and the executables made of it."""

    def __init__(self, comp):
        type_signature = comp.type_signature
        self.parameter_type = type_signature.parameter
        self.result_type = type_signature.result
        self.executables: dict = {}
        self._block = comp.to_building_block()
        self._checked_with_x64: set[bool] = set()

    def check_types(self) -> None:
        """Refuses types that JAX cannot hold as it is set up now."""
        x64 = jax.config.jax_enable_x64
        if x64 in self._checked_with_x64:
            return
        for type_spec in (self.parameter_type, self.result_type):
            if type_spec is not None:
                _check_type(type_spec)
        self._checked_with_x64.add(x64)

    def evaluate(self, loops, cohort: Cohort | None, argument):
        """Evaluates the computation; see `Evaluator`."""
        evaluator = Evaluator(loops, cohort)
        function = evaluator.evaluate(self._block, {})
        value = None
        if self.parameter_type is not None:
            value = _as_value(argument, self.parameter_type)
        return evaluator.result(function(value), self.result_type)


def _as_value(argument, type_spec):
    """Wraps the arrays of client values, so that they are told from the server's."""
    if isinstance(type_spec, frontend.FederatedType) and type_spec.placement is frontend.CLIENTS:
        return AllEqual(argument) if type_spec.all_equal else PerClient(argument)
    if isinstance(type_spec, frontend.StructType):
        parts = zip(argument, frontend.fields(type_spec), strict=True)
        return tuple(_as_value(part, field) for part, (_, field) in parts)
    return argument


def _check_type(type_spec) -> None:
    """Refuses what JAX would change or cannot hold."""
    if isinstance(type_spec, frontend.TensorType):
        dtype = type_spec.dtype
        if dtype.kind in "SUO":
            raise UnsupportedTypeError(f"XLA has no strings, found {type_spec}")
        if type_spec.shape is None or None in type_spec.shape:
            raise UnsupportedTypeError(
                f"the XLA runtime needs fully defined shapes, found {type_spec}"
            )
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise UnsupportedTypeError(
                f"{type_spec} needs 64-bit numbers, which JAX has switched off; call "
                "jax.config.update('jax_enable_x64', True) first, or use a 32-bit dtype"
            )
    elif isinstance(type_spec, frontend.StructType):
        for _, field in frontend.fields(type_spec):
            _check_type(field)
    elif isinstance(type_spec, frontend.FederatedType):
        _check_type(type_spec.member)
    elif isinstance(type_spec, frontend.SequenceType):
        _check_type(type_spec.element)
        if not transfer.tensor_types(type_spec.element):
            raise UnsupportedTypeError(
                f"the elements of a sequence must hold a tensor, found {type_spec}"
            )


def _specs(type_spec, argument):
    """Returns the partition of each array of an argument: by client, or whole on each device."""
    if isinstance(type_spec, frontend.FederatedType) and not type_spec.all_equal:
        return jax.tree_util.tree_map(lambda _: P(_AXIS), argument)
    if isinstance(type_spec, frontend.StructType):
        parts = zip(argument, frontend.fields(type_spec), strict=True)
        return tuple(_specs(field, part) for part, (_, field) in parts)
    return jax.tree_util.tree_map(lambda _: P(), argument)


def _owned(type_spec, argument):
    """Copies the caller's own arrays, which XLA's CPU client would share and the caller may change.

    Values at the clients and sequences were copied into the runtime's layout already.
    """
    if isinstance(argument, SequenceValue):
        return argument
    if isinstance(type_spec, frontend.FederatedType):
        return _owned(type_spec.member, argument) if type_spec.all_equal else argument
    if isinstance(type_spec, frontend.StructType):
        parts = zip(argument, frontend.fields(type_spec), strict=True)
        return tuple(_owned(field, part) for part, (_, field) in parts)
    return np.array(argument) if isinstance(argument, np.ndarray) else argument


def _result_specs(type_spec):
    """Returns the partition of a result as a prefix of its structure."""
    if isinstance(type_spec, frontend.StructType):
        return tuple(_result_specs(field) for _, field in frontend.fields(type_spec))
    if isinstance(type_spec, frontend.FederatedType) and not type_spec.all_equal:
        return P(_AXIS)
    return P()


def create_local_python_execution_context(
    *,
    default_num_clients: int = 0,
    devices: Sequence[jax.Device] | None = None,
    debug: bool = False,
    device_results: bool = False,
) -> XlaExecutionContext:
    """Creates a context that runs JAX computations of TFF in this process.

    Args:
      default_num_clients: Number of clients of a computation whose arguments do not say.
      devices: Devices to spread the clients over; by default all local devices of JAX.
      debug: Run clients one by one without fusing, and name the client and the batch in which an
        error or the first NaN arises. Much slower.
      device_results: Return JAX arrays, which stay on their device, instead of NumPy arrays.

    Returns:
      The context, to be installed with `tff.framework.set_default_context` or used through
      `tff.framework.get_context_stack().install(context)`.

    Raises:
      ValueError: `default_num_clients` is negative or `devices` is empty.
    """
    return XlaExecutionContext(
        default_num_clients=default_num_clients,
        devices=devices,
        debug=debug,
        device_results=device_results,
    )


def set_local_python_execution_context(**options) -> None:
    """Makes a context as `create_local_python_execution_context` does the default of TFF.

    Args:
      **options: Options of `create_local_python_execution_context`.
    """
    frontend.framework.set_default_context(create_local_python_execution_context(**options))


__all__ = [
    "CacheInfo",
    "NoClientsError",
    "UnsupportedTypeError",
    "XlaExecutionContext",
    "create_local_python_execution_context",
    "set_local_python_execution_context",
]
