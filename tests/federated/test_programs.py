"""What is traced and compiled, and how often."""

import cases
import jax
import numpy as np

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
