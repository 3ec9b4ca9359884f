"""Has the sampler mixed, and how far can its averages be trusted? ArviZ's answers as small tables.

ArviZ 0.21 (lane A) and 1.x (lane B) share the calls used here: data sets in, data sets out.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pandas as pd


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """Diagnostics of each scalar of an array of draws, each float64 `[...]` of the scalar's shape.

    Attributes:
      r_hat: Rank-normalized split R-hat: 1 where the chains agree, suspect above 1.01; not a number
        for a single chain, which has nothing to agree with.
      ess_bulk: Effective sample size for the centre of the distribution.
      ess_tail: Effective sample size for its 5% and 95% quantiles.
      mcse_mean: Monte Carlo standard error of the mean.
      mcse_sd: Monte Carlo standard error of the standard deviation.
    """

    r_hat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray
    mcse_mean: np.ndarray
    mcse_sd: np.ndarray


def diagnose(draws: np.ndarray, *, num_chain_axes: int = 1) -> Diagnostics:
    """Computes R-hat, effective sample sizes and Monte Carlo errors.

    Source: Vehtari, Gelman, Simpson, Carpenter, Bürkner, "Rank-normalization, folding, and
    localization: an improved R-hat for assessing convergence of MCMC", Bayesian Analysis, 2021.

    Args:
      draws: `[num_draws, chain axes..., ...]`.
      num_chain_axes: How many axes after the first count chains: 0 for one chain, 2 for
        `[num_draws, num_devices, num_chains, ...]`.

    Returns:
      The diagnostics of each scalar.

    Raises:
      ValueError: There are too few axes, or fewer than 4 draws.
    """
    import arviz  # Takes seconds; only those who diagnose pay.

    chains = _chains_first(draws, num_chain_axes)
    dataset = arviz.convert_to_dataset({"x": chains})
    several = len(chains) > 1
    return Diagnostics(
        # Of a single chain ArviZ 0.21 logs a warning and returns the same.
        r_hat=arviz.rhat(dataset)["x"].values if several else np.full(chains.shape[2:], np.nan),
        ess_bulk=arviz.ess(dataset, method="bulk")["x"].values,
        ess_tail=arviz.ess(dataset, method="tail")["x"].values,
        mcse_mean=arviz.mcse(dataset, method="mean")["x"].values,
        mcse_sd=arviz.mcse(dataset, method="sd")["x"].values,
    )


def summarize(
    draws: Mapping[str, np.ndarray], *, num_chain_axes: int = 1, round_to_mcse: bool = False
) -> pd.DataFrame:
    """Tabulates posterior moments, quantiles and diagnostics, a row a scalar.

    Args:
      draws: Arrays `[num_draws, chain axes..., ...]` by name.
      num_chain_axes: As in `diagnose`.
      round_to_mcse: Show only digits that the Monte Carlo error leaves: mean, sd and quantiles
        to the smallest power of ten that is at least twice their own Monte Carlo error (that of
        the mean for the quantiles), errors and effective sample sizes to one significant digit,
        R-hat to two decimals. A run that differs in rounding shows other last digits less often
        then; it still can.

    Returns:
      Columns mean, sd, q5, q95, mcse_mean, mcse_sd, ess_bulk, ess_tail, r_hat; the index holds
      `name` or `name[i, j]`.

    Raises:
      ValueError: As in `diagnose`.
    """
    tables = []
    for name, values in draws.items():
        values = np.asarray(values)
        diagnostics = diagnose(values, num_chain_axes=num_chain_axes)
        pooled = _chains_first(values, num_chain_axes)
        pooled = pooled.reshape(-1, *pooled.shape[2:]).astype(np.float64)
        low, high = np.quantile(pooled, (0.05, 0.95), axis=0)
        columns = {
            "mean": pooled.mean(axis=0),
            "sd": pooled.std(axis=0, ddof=1),
            "q5": low,
            "q95": high,
            "mcse_mean": diagnostics.mcse_mean,
            "mcse_sd": diagnostics.mcse_sd,
            "ess_bulk": diagnostics.ess_bulk,
            "ess_tail": diagnostics.ess_tail,
            "r_hat": diagnostics.r_hat,
        }
        index = [name + _place(place) for place in np.ndindex(pooled.shape[1:])]
        tables.append(
            pd.DataFrame({key: np.ravel(value) for key, value in columns.items()}, index=index)
        )
    table = pd.concat(tables)
    return _round_to_mcse(table) if round_to_mcse else table


def _place(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


def _chains_first(draws: np.ndarray, num_chain_axes: int) -> np.ndarray:
    """Reorders to ArviZ' `[num_chains, num_draws, ...]`."""
    draws = np.asarray(draws)
    if num_chain_axes < 0 or draws.ndim < 1 + num_chain_axes:
        raise ValueError(
            f"draws of shape {draws.shape} do not have a draw axis and num_chain_axes="
            f"{num_chain_axes} chain axes; expected [num_draws, chain axes..., ...]"
        )
    if draws.shape[0] < 4:
        raise ValueError(f"diagnostics need at least 4 draws a chain, given {draws.shape[0]}")
    event_shape = draws.shape[1 + num_chain_axes :]
    num_chains = int(np.prod(draws.shape[1 : 1 + num_chain_axes], dtype=int))
    return np.moveaxis(draws.reshape(draws.shape[0], num_chains, *event_shape), 1, 0)


def _round_to_mcse(table: pd.DataFrame) -> pd.DataFrame:
    errors = {"mean": "mcse_mean", "sd": "mcse_sd", "q5": "mcse_mean", "q95": "mcse_mean"}
    rounded = table.copy()
    for column, error in errors.items():
        exponents = _exponents(2 * table[error], np.ceil)
        rounded[column] = _round(table[column], -exponents)
    for column in ("mcse_mean", "mcse_sd", "ess_bulk", "ess_tail"):
        rounded[column] = _round(table[column], -_exponents(table[column], np.floor))
    rounded["r_hat"] = table["r_hat"].round(2)
    return rounded


def _exponents(values: pd.Series, to_integer: np.ufunc) -> np.ndarray:
    """Exponents of ten at or around the values; a constant or undefined one keeps 12 decimals."""
    usable = np.isfinite(values) & (values > 0)
    exponents = to_integer(np.log10(np.where(usable, values, 1e-12)))
    return exponents.astype(int)


def _round(values: pd.Series, decimals: np.ndarray) -> list[float]:
    # Adding 0 makes a negative zero positive: the sign of what was rounded away is noise.
    return [round(float(value), int(places)) + 0.0 for value, places in zip(values, decimals)]
