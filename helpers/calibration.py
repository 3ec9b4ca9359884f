"""How far the probabilities of predictions can be trusted: by bins of confidence.

The confidence of a prediction is the probability that it gives to the label it predicts. Where
predictions are calibrated, four fifths of those with confidence 0.8 are right.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ConfidenceBins:
    """Predictions in bins of confidence of equal width, each with its lower bound in it.

    Attributes:
      edges: Bounds of the bins, float64 `[num_bins + 1]` from 0 to 1.
      counts: Number of predictions in each bin, int64 `[num_bins]`.
      mean_confidence: Their mean confidence, float64 `[num_bins]`, NaN in an empty bin.
      accuracy: Share of them that is right, float64 `[num_bins]`, NaN in an empty bin.
    """

    edges: np.ndarray
    counts: np.ndarray
    mean_confidence: np.ndarray
    accuracy: np.ndarray


def bin_by_confidence(
    confidences: np.ndarray, correct: np.ndarray, num_bins: int = 10
) -> ConfidenceBins:
    """Sorts predictions into bins of confidence.

    Args:
      confidences: Probability of the predicted label, from 0 to 1, float `[num_examples]`.
      correct: Whether it was the right one, bool `[num_examples]`.
      num_bins: Number of bins of equal width; confidence 1 is in the last.

    Returns:
      The bins.

    Raises:
      ValueError: The arrays are empty or differ in shape, a confidence is no probability, or there
        is no bin.
      TypeError: `correct` is not bool.
    """
    confidences, correct = np.asarray(confidences, np.float64), np.asarray(correct)
    if confidences.ndim != 1 or confidences.shape != correct.shape or not confidences.size:
        raise ValueError(
            f"confidences {confidences.shape} and correct {correct.shape} must both be "
            "[num_examples], and not empty"
        )
    if correct.dtype != bool:
        raise TypeError(f"correct must be bool, given {correct.dtype}; compare labels first")
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError("confidences must lie between 0 and 1; give probabilities, not logits")
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, given {num_bins}")
    bins = np.minimum((confidences * num_bins).astype(int), num_bins - 1)
    counts = np.bincount(bins, minlength=num_bins)
    divisor = np.where(counts, counts, np.nan)
    return ConfidenceBins(
        edges=np.linspace(0, 1, num_bins + 1),
        counts=counts,
        mean_confidence=np.bincount(bins, confidences, num_bins) / divisor,
        accuracy=np.bincount(bins, correct, num_bins) / divisor,
    )


def expected_calibration_error(
    confidences: np.ndarray, correct: np.ndarray, num_bins: int = 10
) -> float:
    """Computes by how much confidence and accuracy differ, on average over predictions.

    It is the mean over bins of |accuracy - mean confidence|, weighted by the predictions in each:
    0 where every bin is calibrated. Few predictions a bin bias it upwards.

    Source: Naeini, Cooper and Hauskrecht, Obtaining well calibrated probabilities using Bayesian
    binning, AAAI 2015; Guo, Pleiss, Sun and Weinberger, On calibration of modern neural networks,
    ICML 2017. The bins are those of `plotting.plot_reliability`.

    Args:
      confidences: Probability of the predicted label, from 0 to 1, float `[num_examples]`.
      correct: Whether it was the right one, bool `[num_examples]`.
      num_bins: Number of bins of equal width.

    Returns:
      The error, between 0 and 1.

    Raises:
      ValueError, TypeError: As `bin_by_confidence`.
    """
    bins = bin_by_confidence(confidences, correct, num_bins)
    gaps = np.abs(bins.accuracy - bins.mean_confidence)
    return float(np.nansum(bins.counts * gaps) / bins.counts.sum())
