"""Data for the notebooks: images, and how they are dealt out to federated clients.

`load_mnist` returns the same thing from three sources; `partition_clients`, `batch_clients` and
`sample_cohort` make federated clients of it. Nothing here imports TensorFlow or JAX, except
`load_mnist(source="tfds")`, which imports TensorFlow Datasets when it is called.
"""

from helpers.data.clients import batch_clients, partition_clients, sample_cohort
from helpers.data.errors import DataError
from helpers.data.mnist import ImageDataset, load_mnist, to_float

__all__ = [
    "DataError",
    "ImageDataset",
    "batch_clients",
    "load_mnist",
    "partition_clients",
    "sample_cohort",
    "to_float",
]
