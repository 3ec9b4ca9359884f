"""Federated averaging in JAX behind TFF's standard API.

The method is FedAvg: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv:1602.05629; the server
learning rate is that of Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
arXiv:2003.00295, with plain SGD at the server.
"""

import collections
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from helpers.federated import frontend
from helpers.federated.frontend import tff

ClientWeighting = Literal["uniform", "examples"] | Callable[..., jax.Array]


def build_jax_federated_averaging_process(
    batch_type,
    model_type,
    loss_fn: Callable,
    step_size: float,
    *,
    client_weighting: ClientWeighting = "uniform",
    server_learning_rate: float = 1.0,
    metrics: bool = False,
):
    """Builds federated averaging of a JAX model, with one pass of SGD at each client a round.

    With the options at their defaults, `next(model, client_data)` returns the plain mean of the
    clients' trained models, as the process of this name in TFF did. A client without a batch takes
    part with the model it was sent; weighted by examples it does not count.

    Args:
      batch_type: TFF type of one batch (or what `tff.to_type` makes one of), a struct of tensors;
        the axis of examples is the leading one of each tensor.
      model_type: TFF type of the model, a tensor or a struct of float tensors.
      loss_fn: JAX function `(model, batch) -> float scalar`, the mean loss of the batch. Model and
        batch come in the containers of their types.
      step_size: Learning rate of the clients' SGD.
      client_weighting: What the mean over clients is weighted by: 'uniform', 'examples' (the number
        of batches times the leading axis of the batch), or a JAX function `batch -> scalar` whose
        sum over a client's batches is its weight (for padded batches: the sum of the mask).
      server_learning_rate: The server moves this far from the old model to the mean; 1 replaces the
        model by the mean.
      metrics: Return also what happened in the round.

    Returns:
      A `tff.templates.IterativeProcess`. `initialize()` returns zeros of the model type.
      `next(model, client_data)`, with a list that holds each client's batches, returns the new
      model; with `metrics=True` a pair of the new model and an ordered dict of `loss` (float32,
      mean over all batches of the loss before the step on that batch; 0 where no client has one),
      `num_batches`, `num_clients` (int32) and `weight` (float32, the sum of the clients' weights).

    Raises:
      TypeError: `model_type` holds something else than float tensors.
      ValueError: `step_size` or `server_learning_rate` is not a positive number,
        `client_weighting` is unknown, or 'examples' is asked for and a batch has no leading axis.
    """
    batch_type, model_type = tff.to_type(batch_type), tff.to_type(model_type)
    _check_positive("step_size", step_size)
    _check_positive("server_learning_rate", server_learning_rate)
    # NumPy's scalars have a dtype that would widen a half-precision model.
    step_size, server_learning_rate = float(step_size), float(server_learning_rate)
    _check_floats(model_type)
    batch_weight = _batch_weight(client_weighting, batch_type)
    plain = client_weighting == "uniform" and server_learning_rate == 1.0

    @tff.jax.computation
    def zero_model():
        return _map_type(lambda tensor: jnp.zeros(tensor.shape, tensor.dtype), model_type)

    @tff.jax.computation
    def zero_progress():
        return collections.OrderedDict(
            loss=jnp.float32(0), num_batches=jnp.int32(0), weight=jnp.float32(0)
        )

    progress_type = zero_progress.type_signature.result
    state_type = tff.to_type(collections.OrderedDict(model=model_type, progress=progress_type))

    def sgd_step(model, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(model, batch)
        return jax.tree_util.tree_map(lambda p, g: p - step_size * g, model, gradient), loss

    @tff.jax.computation(model_type, batch_type)
    def train_on_batch(model, batch):
        return sgd_step(model, batch)[0]

    @tff.jax.computation(state_type, batch_type)
    def train_and_measure(state, batch):
        model, loss = sgd_step(state["model"], batch)
        progress = state["progress"]
        return collections.OrderedDict(
            model=model,
            progress=collections.OrderedDict(
                loss=progress["loss"] + loss.astype(jnp.float32),
                num_batches=progress["num_batches"] + 1,
                weight=progress["weight"] + _scalar_weight(batch_weight(batch)),
            ),
        )

    @tff.jax.computation(progress_type)
    def client_weight(progress):
        return jnp.float32(1) if client_weighting == "uniform" else progress["weight"]

    @tff.jax.computation(model_type, model_type)
    def difference(trained, sent):
        return jax.tree_util.tree_map(jnp.subtract, trained, sent)

    @tff.jax.computation(model_type, model_type)
    def move(model, update):
        return jax.tree_util.tree_map(lambda p, u: p + server_learning_rate * u, model, update)

    @tff.jax.computation
    def one():
        return jnp.int32(1)

    @tff.jax.computation(progress_type, np.int32, np.float32)
    def summarize(total, num_clients, weight):
        batches = jnp.maximum(total["num_batches"], 1).astype(jnp.float32)
        return collections.OrderedDict(
            loss=total["loss"] / batches,
            num_batches=total["num_batches"],
            num_clients=num_clients,
            weight=weight,
        )

    server_model_type = tff.FederatedType(model_type, tff.SERVER)
    data_type = tff.SequenceType(batch_type)
    client_data_type = tff.FederatedType(data_type, tff.CLIENTS)

    @tff.federated_computation
    def initialize():
        return tff.federated_eval(zero_model, tff.SERVER)

    @tff.federated_computation(model_type, data_type)
    def train_client(model, batches):
        return tff.sequence_reduce(batches, model, train_on_batch)

    @tff.federated_computation(model_type, data_type)
    def train_and_measure_client(model, batches):
        start = collections.OrderedDict(model=model, progress=zero_progress())
        end = tff.sequence_reduce(batches, start, train_and_measure)
        return collections.OrderedDict(
            model=end["model"],
            update=difference(end["model"], model),
            progress=end["progress"],
            weight=client_weight(end["progress"]),
        )

    @tff.federated_computation(server_model_type, client_data_type)
    def plain_round(model, client_data):
        sent = tff.federated_broadcast(model)
        return tff.federated_mean(tff.federated_map(train_client, (sent, client_data)))

    @tff.federated_computation(server_model_type, client_data_type)
    def full_round(model, client_data):
        sent = tff.federated_broadcast(model)
        trained = tff.federated_map(train_and_measure_client, (sent, client_data))
        if plain:
            new_model = tff.federated_mean(trained["model"])
        else:
            update = tff.federated_mean(trained["update"], weight=trained["weight"])
            new_model = tff.federated_map(move, (model, update))
        if not metrics:
            return new_model
        num_clients = tff.federated_sum(tff.federated_eval(one, tff.CLIENTS))
        total = tff.federated_sum(trained["progress"])
        weight = tff.federated_sum(trained["weight"])
        return new_model, tff.federated_map(summarize, (total, num_clients, weight))

    next_fn = plain_round if plain and not metrics else full_round
    return tff.templates.IterativeProcess(initialize_fn=initialize, next_fn=next_fn)


def _check_positive(name: str, value) -> None:
    if isinstance(value, bool) or not np.isscalar(value) or not np.isreal(value) or not value > 0:
        raise ValueError(f"{name} must be a positive number, given {value!r}")
    if not np.isfinite(value):
        raise ValueError(f"{name} must be finite, given {value!r}")


def _check_floats(model_type) -> None:
    if isinstance(model_type, frontend.StructType):
        for _, field in frontend.fields(model_type):
            _check_floats(field)
    elif not (
        isinstance(model_type, frontend.TensorType)
        and jnp.issubdtype(model_type.dtype, jnp.floating)
    ):
        raise TypeError(
            f"model_type must be a float tensor or a struct of float tensors, found {model_type}"
        )


def _batch_weight(client_weighting, batch_type) -> Callable:
    """Returns the function that says what a batch adds to its client's weight."""
    if callable(client_weighting):
        return client_weighting
    if client_weighting == "uniform":
        return lambda batch: 0.0
    if client_weighting != "examples":
        raise ValueError(
            "client_weighting must be 'uniform', 'examples' or a function of a batch, "
            f"given {client_weighting!r}"
        )
    sizes = {tensor.shape[0] if tensor.shape else None for tensor in _tensors(batch_type)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            "client_weighting='examples' needs one leading axis of examples in all tensors of the "
            f"batch, found {batch_type}; pass a function of a batch instead"
        )
    examples = float(sizes.pop())
    return lambda batch: examples


def _scalar_weight(weight) -> jax.Array:
    if jnp.shape(weight) != ():
        raise ValueError(
            "client_weighting must return one number a batch, it returned shape "
            f"{list(jnp.shape(weight))}; sum it"
        )
    return jnp.float32(weight)


def _tensors(type_spec):
    if isinstance(type_spec, frontend.StructType):
        for _, field in frontend.fields(type_spec):
            yield from _tensors(field)
    else:
        yield type_spec


def _map_type(function: Callable, type_spec):
    """Builds a value of a type from a function of its tensor types."""
    if isinstance(type_spec, frontend.StructType):
        struct = frontend.Struct(
            [(name, _map_type(function, field)) for name, field in frontend.fields(type_spec)]
        )
        return frontend.type_to_py_container(struct, type_spec)
    return function(type_spec)
