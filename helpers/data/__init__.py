"""Data for the notebooks: images, who watched what, and images dealt out to federated clients.

`load_mnist` and `load_movielens` return the same thing from three sources each;
`partition_clients`, `batch_clients` and `sample_cohort` make federated clients of images,
`split_views` holds out views. Nothing here imports TensorFlow or JAX, except `source="tfds"`, which
imports TensorFlow Datasets when it is asked for.
"""

from helpers.data.clients import batch_clients, partition_clients, sample_cohort
from helpers.data.errors import DataError
from helpers.data.mnist import ImageDataset, load_mnist, to_float
from helpers.data.movielens import ViewDataset, load_movielens, split_views

__all__ = [
    "DataError",
    "ImageDataset",
    "ViewDataset",
    "batch_clients",
    "load_mnist",
    "load_movielens",
    "partition_clients",
    "sample_cohort",
    "split_views",
    "to_float",
]
