"""A fresh context for each test, and the count of what JAX really compiles."""

import jax
import pytest

from helpers import federated
from helpers.federated import tff


@pytest.fixture(autouse=True, scope="session")
def _no_native_context():
    # TFF's own default context prints an error when the interpreter ends.
    federated.set_local_python_execution_context()


@pytest.fixture(autouse=True)
def context():
    """The XLA context, installed for the test; what TFF had before comes back after it."""
    context = federated.create_local_python_execution_context()
    with tff.framework.get_context_stack().install(context):
        yield context


@pytest.fixture
def debug():
    """The debug context, installed for the test."""
    context = federated.create_local_python_execution_context(debug=True)
    with tff.framework.get_context_stack().install(context):
        yield context


@pytest.fixture
def compile_events():
    """A list that grows by one for each program that XLA compiles, by JAX's own account."""
    events = []

    def listen(event, _duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    if hasattr(jax.monitoring, "unregister_event_duration_listener"):
        jax.monitoring.unregister_event_duration_listener(listen)
        return
    from jax._src import monitoring  # The public module of jax 0.4.30 cannot remove a listener.

    monitoring._unregister_event_duration_listener_by_callback(listen)
