"""Markov chain Monte Carlo in chunks: progress, checkpoints, exact resume, diagnostics."""

from helpers.sampling.diagnostics import Diagnostics, diagnose, summarize
from helpers.sampling.kernel_results import DIVERGENCE_THRESHOLD
from helpers.sampling.run import Draws, RunInfo, SamplingInterrupted, sample
from helpers.sampling.step_size import initial_step_size

__all__ = [
    "DIVERGENCE_THRESHOLD",
    "Diagnostics",
    "Draws",
    "RunInfo",
    "SamplingInterrupted",
    "diagnose",
    "initial_step_size",
    "sample",
    "summarize",
]
