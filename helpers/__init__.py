"""Helpers for the notebooks. Importing it starts neither TensorFlow nor JAX: a submodule does."""
