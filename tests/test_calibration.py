import numpy as np
import pytest

from helpers.calibration import bin_by_confidence, expected_calibration_error

CONFIDENCES = np.array([0.62, 0.64, 0.93, 0.95, 1.0])
CORRECT = np.array([True, False, True, True, False])


def test_bins_hold_hand_counts():
    bins = bin_by_confidence(CONFIDENCES, CORRECT, 5)
    np.testing.assert_allclose(bins.edges, [0, 0.2, 0.4, 0.6, 0.8, 1])
    np.testing.assert_array_equal(bins.counts, [0, 0, 0, 2, 3])
    np.testing.assert_allclose(bins.mean_confidence, [np.nan] * 3 + [0.63, 0.96])
    np.testing.assert_allclose(bins.accuracy, [np.nan] * 3 + [0.5, 2 / 3])


def test_a_bin_holds_its_lower_bound_and_the_last_bin_both():
    bins = bin_by_confidence([0.0, 0.25, 0.5, 0.75, 1.0], np.ones(5, bool), 4)
    np.testing.assert_array_equal(bins.counts, [1, 1, 1, 2])


def test_error_equals_the_sum_by_hand():
    # Bins [0.6, 0.7) and [0.9, 1]: gaps |1/2 - 0.63| and |2/3 - 0.96| of 2 and 3 predictions.
    expected = 2 / 5 * 0.13 + 3 / 5 * (0.96 - 2 / 3)
    assert expected_calibration_error(CONFIDENCES, CORRECT) == pytest.approx(expected)


def test_one_bin_compares_the_means():
    expected = CONFIDENCES.mean() - CORRECT.mean()
    assert expected_calibration_error(CONFIDENCES, CORRECT, 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("confidence", "correct", "expected"), [(1.0, True, 0), (1.0, False, 1), (0.0, True, 1)]
)
def test_certain_predictions_have_the_extreme_errors(confidence, correct, expected):
    found = expected_calibration_error(np.full(7, confidence), np.full(7, correct))
    assert found == expected


def test_error_of_calibrated_predictions_vanishes_with_their_number():
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.1, 1, 200_000)
    correct = rng.uniform(size=confidences.size) < confidences
    # Each bin's accuracy has a standard error of at most 0.5 / sqrt(200,000 / 9) = 0.0034.
    assert expected_calibration_error(confidences, correct) < 0.0034
    # Less sure than they may be, by a ninth of 0.9 * 0.55, the mean confidence.
    assert expected_calibration_error(confidences * 0.9, correct) == pytest.approx(0.055, abs=0.004)


def test_float32_as_models_give_it_is_taken():
    found = expected_calibration_error(CONFIDENCES.astype(np.float32), CORRECT)
    assert found == pytest.approx(expected_calibration_error(CONFIDENCES, CORRECT), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"confidences": np.array([3.0] * 5)}, ValueError, "not logits"),
        ({"confidences": np.array([np.nan] * 5)}, ValueError, "not logits"),
        ({"confidences": np.full((5, 10), 0.1)}, ValueError, r"\(5, 10\) and correct \(5,\) must"),
        ({"confidences": np.zeros(0), "correct": np.zeros(0, bool)}, ValueError, "not empty"),
        ({"correct": np.arange(5)}, TypeError, "correct must be bool, given int64; compare"),
        ({"num_bins": 0}, ValueError, "num_bins must be at least 1, given 0"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    arguments = {"confidences": CONFIDENCES, "correct": CORRECT} | change
    with pytest.raises(error, match=message):
        expected_calibration_error(**arguments)
