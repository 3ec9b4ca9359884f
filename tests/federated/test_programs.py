"""What is traced and compiled, and how often."""

import gc
import weakref

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import federated
from helpers.federated import context as context_module
from helpers.federated import tff


def _process(**options):
    return federated.build_jax_federated_averaging_process(
        cases.BATCH_TYPE, cases.MODEL_TYPE, cases.loss, cases.STEP_SIZE, **options
    )


def test_a_second_call_neither_traces_nor_compiles(context, compile_events):
    process, generator = _process(), np.random.default_rng(0)
    model = process.next(cases.zeros(), cases.random_cohort(generator, [3, 1, 2]))
    before = context.cache_info()
    compile_events.clear()
    for _ in range(3):
        model = process.next(model, cases.random_cohort(generator, [2, 2, 2]))
    after = context.cache_info()
    assert (after.traces, after.compilations) == (before.traces, before.compilations)
    assert after.calls == before.calls + 3
    assert compile_events == []


def test_the_count_of_compilations_is_jax_own(context, compile_events):
    process = _process()
    process.next(cases.zeros(), cases.random_cohort(np.random.default_rng(0), [2, 1]))
    assert context.cache_info().compilations == 1
    assert len(compile_events) == 1


def test_cohorts_of_similar_size_share_a_program(context):
    process, generator = _process(), np.random.default_rng(0)
    for lengths in ([20] * 30, [21] * 31, [19] * 32):
        process.next(cases.zeros(), cases.random_cohort(generator, lengths))
    assert context.cache_info().compilations <= 2


def test_equal_computations_share_a_program(context):
    add = tff.jax.computation(lambda x, y: x + y, np.int32, np.int32)
    proto = tff.framework.serialize_computation(add)
    for _ in range(3):
        assert tff.framework.deserialize_computation(proto)(1, 2) == 3
    assert context.cache_info().compilations == 1


def test_old_programs_are_forgotten(context, monkeypatch):
    monkeypatch.setattr(context_module, "_PROGRAMS_KEPT", 2)
    computations = [_plus(n) for n in range(4)]
    for n, computation in enumerate(computations):
        assert computation(1) == 1 + n
    assert context.cache_info().computations == 2
    assert computations[0](1) == 1


def _plus(n):
    return tff.jax.computation(lambda x: x + n, np.int32)


def test_a_leaf_that_is_used_often_is_in_the_program_once():
    leaf = tff.jax.computation(lambda x: jax.numpy.sin(x), np.float32)
    many = tff.federated_computation(lambda x: [leaf(leaf(leaf(x))), leaf(x)], np.float32)
    block = many.to_building_block()
    from helpers.federated.evaluate import Evaluator, FusedLoops

    def run(x):
        return Evaluator(FusedLoops(), None).evaluate(block, {})(x)

    text = jax.jit(run).lower(np.float32(1)).as_text()
    assert text.count("stablehlo.sine") == 1
    assert text.count("call @") >= 4


def test_equal_types_share_a_program_however_the_value_is_held(context):
    increment = _plus(1)
    for value in (1, np.int32(1), np.array(1, np.int32), jnp.int32(1), jnp.asarray(1), np.int8(1)):
        assert increment(value) == 2
    assert context.cache_info().compilations == 1


def test_another_structure_of_clients_is_another_program(context):
    computation = tff.federated_computation(
        tff.federated_sum, tff.FederatedType(np.int32, tff.CLIENTS)
    )
    assert [computation([1] * n) for n in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert context.cache_info().compilations == 2


def test_device_values_compile_nothing_after_the_first_call(context, compile_events):
    process = _process()
    data_type = process.next.type_signature.parameter[1]
    cohort = cases.random_cohort(np.random.default_rng(0), [2, 1])
    data = context.device_put(cohort, data_type)
    model = process.next(cases.zeros(), data)
    compile_events.clear()
    process.next(model, data)
    assert compile_events == []


def test_a_failed_call_leaves_no_program_behind(context):
    broken = cases.tensorflow_leaf()
    for _ in range(2):
        with pytest.raises(federated.UnsupportedLeafError):
            broken(1)
    assert context.cache_info().compilations == 0
    assert _plus(1)(1) == 2


def test_forgotten_programs_are_freed(context, monkeypatch):
    monkeypatch.setattr(context_module, "_PROGRAMS_KEPT", 2)
    first = _plus(0)
    assert first(1) == 1
    program = weakref.ref(context._program(first))
    for n in range(1, 3):
        assert _plus(n)(1) == 1 + n
    gc.collect()
    assert program() is None


def test_the_thread_of_a_dropped_context_ends():
    context = federated.create_local_python_execution_context()
    with tff.framework.get_context_stack().install(context):
        assert _plus(1)(1) == 2
    thread = context._worker._thread
    del context
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
