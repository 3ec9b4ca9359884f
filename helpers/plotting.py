"""The figures of the notebooks: arrays in, matplotlib axes out.

Every function draws on the axes that it is given and returns them; with `ax=None` they are those of
a new figure, `ax.figure`. Lines differ in dash and marker as well as in colour, areas in hatch, and
the colours are seaborn's for the colour-blind, so that figures can be read in grey too.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from helpers.calibration import bin_by_confidence

if TYPE_CHECKING:
    import jax

_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "//", "\\\\", "..", "xx", "--", "++", "oo")
_MAX_LEGEND_ENTRIES = 8
# For lines that fill the axes: within them it would hide some.
_LEGEND_ABOVE = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 3,
    "frameon": False,
    "borderpad": 0,
    "handlelength": 1.5,
    "columnspacing": 1.0,
}


def plot_by_round(ax: Axes | None, curves: Mapping[str, np.ndarray], *, ylabel: str) -> Axes:
    """Draws quantities of a federated run against the round.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      curves: Values by name, each `[num_rounds]`; a single curve gets no legend.
      ylabel: What the values are.

    Returns:
      The axes.
    """
    ax = _axes(ax)
    colors = _colors(len(curves))
    for index, (name, values) in enumerate(curves.items()):
        ax.plot(
            np.arange(len(values)),
            values,
            label=name if len(curves) > 1 else None,
            color=colors[index],
            linestyle=_DASHES[index % len(_DASHES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markevery=max(len(values) // 10, 1),
            markersize=4,
        )
    return _finish(ax, "round", ylabel, fontsize=None)


def plot_label_shares(
    ax: Axes | None, labels: Sequence[np.ndarray], *, num_classes: int = 10
) -> Axes:
    """Draws which labels each client holds: a column a client, a row a label, darker is more.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      labels: For each client, integers `[num_examples]` from 0 to `num_classes - 1`.
      num_classes: Number of different labels.

    Returns:
      The axes.
    """
    ax = _axes(ax)
    counts = np.stack([np.bincount(client, minlength=num_classes) for client in labels], axis=1)
    shares = counts / counts.sum(axis=0)
    sns.heatmap(
        shares, ax=ax, cmap="Greys", vmin=0, vmax=1, cbar_kws={"label": "share of the client"}
    )
    ax.set_xlabel("client")
    ax.set_ylabel("label")
    ax.tick_params(axis="y", rotation=0)
    return ax


def plot_traces(
    ax: Axes | None, draws: np.ndarray, *, ylabel: str, truth: float | None = None
) -> Axes:
    """Draws a scalar against the draw, a line a chain.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      draws: `[num_draws]` or `[num_draws, num_chains]`.
      ylabel: What the scalar is.
      truth: Its true value, if known.

    Returns:
      The axes.

    Raises:
      ValueError: `draws` has another number of axes.
    """
    ax = _axes(ax)
    draws = _columns("draws", draws, "[num_draws] or [num_draws, num_chains]")
    _draw_chains(ax, np.arange(len(draws)), draws)
    if truth is not None:
        ax.axhline(truth, color="black", linestyle="--", linewidth=1.5, label="truth", zorder=3)
    return _finish(ax, "draw", ylabel, **_LEGEND_ABOVE)


def plot_warmup_and_draws(
    ax: Axes | None, warmup: np.ndarray, draws: np.ndarray, *, ylabel: str
) -> Axes:
    """Draws a quantity of the sampler against its step, with warm-up shaded.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      warmup: Values during warm-up, `[num_warmup]` or `[num_warmup, num_chains]`.
      draws: Values afterwards, `[num_steps]` or `[num_steps, num_chains]`.
      ylabel: What the quantity is: log density, accuracy, step size.

    Returns:
      The axes.

    Raises:
      ValueError: The two have other or different numbers of axes or chains.
    """
    ax = _axes(ax)
    warmup = _columns("warmup", warmup, "[num_warmup] or [num_warmup, num_chains]")
    draws = _columns("draws", draws, "[num_steps] or [num_steps, num_chains]")
    if warmup.shape[1] != draws.shape[1]:
        raise ValueError(
            f"warmup has {warmup.shape[1]} chains and draws have {draws.shape[1]}; give both of "
            "the same run"
        )
    values = np.concatenate([warmup, draws])
    if len(warmup):
        ax.axvspan(-0.5, len(warmup) - 0.5, color="0.88", zorder=0, label="warm-up")
    _draw_chains(ax, np.arange(len(values)), values)
    ax.set_xlim(-0.5, len(values) - 0.5)
    return _finish(ax, "step", ylabel, **_LEGEND_ABOVE)


def plot_scatter(
    ax: Axes | None, draws: np.ndarray, *, labels: tuple[str, str] = ("x[0]", "x[1]")
) -> Axes:
    """Draws two-dimensional draws as points, a colour and marker a chain.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      draws: `[num_draws, num_chains, 2]`.
      labels: Names of the two coordinates.

    Returns:
      The axes.

    Raises:
      ValueError: `draws` has another shape.
    """
    ax = _axes(ax)
    draws = np.asarray(draws)
    if draws.ndim != 3 or draws.shape[2] != 2:
        raise ValueError(
            f"draws of shape {draws.shape} cannot be drawn in the plane; expected "
            "[num_draws, num_chains, 2]"
        )
    num_chains = draws.shape[1]
    for chain, color in enumerate(_colors(num_chains)):
        ax.plot(
            *draws[:, chain].T,
            linestyle="none",
            marker=_MARKERS[chain % len(_MARKERS)],
            markersize=3,
            alpha=0.5,
            color=color,
            label=f"chain {chain}" if num_chains > 1 else None,
        )
    ax.set_aspect("equal", adjustable="datalim")
    return _finish(ax, *labels)


def plot_histogram(
    ax: Axes | None,
    values: Mapping[str, np.ndarray],
    *,
    xlabel: str,
    truth: float | None = None,
    bins: int = 30,
) -> Axes:
    """Draws densities of samples as outlines over common bins.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      values: Samples of any shape by name.
      xlabel: What the values are.
      truth: The true value, if known.
      bins: Number of bins.

    Returns:
      The axes.
    """
    ax = _axes(ax)
    flat = {name: np.ravel(samples) for name, samples in values.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(flat.values())), bins=bins)
    told_apart = len(flat) > 1 or truth is not None
    for index, (name, samples) in enumerate(flat.items()):
        color = _colors(len(flat))[index]
        label = name if told_apart else None
        heights, _ = np.histogram(samples, bins=edges, density=True)
        dash = _DASHES[index % len(_DASHES)]
        ax.stairs(heights, edges, color=color, linestyle=dash, linewidth=1.5, label=label)
        ax.stairs(heights, edges, color=color, alpha=0.2, fill=True)
    if truth is not None:
        ax.axvline(truth, color="black", linestyle="--", linewidth=1.5, label="truth")
    return _finish(ax, xlabel, "density")


def plot_bars(ax: Axes | None, names: Sequence[str], values: np.ndarray, *, xlabel: str) -> Axes:
    """Draws a horizontal bar for each named value, the first on top.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      names: What each bar is.
      values: Its length, `[num_bars]`.
      xlabel: What the values are.

    Returns:
      The axes.

    Raises:
      ValueError: There is not a name for each value.
    """
    ax = _axes(ax)
    values = np.asarray(values)
    if values.shape != (len(names),):
        raise ValueError(f"values of shape {values.shape} need as many names, given {len(names)}")
    rows = np.arange(len(names))
    ax.barh(rows, values, color=_colors(1)[0], edgecolor="black", linewidth=0.5)
    ax.set_yticks(rows, names, fontsize="small")
    ax.invert_yaxis()
    return _finish(ax, xlabel, "")


def plot_reliability(
    ax: Axes | None, confidences: np.ndarray, correct: np.ndarray, *, num_bins: int = 10
) -> Axes:
    """Draws how often predictions are right against how sure they are, with examples a bin.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      confidences: Probability of the predicted label, from 0 to 1, `[num_examples]`.
      correct: Whether it was the right one, bool `[num_examples]`.
      num_bins: Number of bins of equal width.

    Returns:
      The axes; those of the counts share its x axis.

    Raises:
      ValueError, TypeError: As `calibration.bin_by_confidence`.
    """
    ax = _axes(ax)
    bins = bin_by_confidence(confidences, correct, num_bins)
    filled = bins.counts > 0

    count_ax = ax.twinx()
    count_ax.stairs(bins.counts, bins.edges, fill=True, color="0.85")
    count_ax.set_ylabel("examples")
    ax.set_zorder(count_ax.get_zorder() + 1)  # Lines over bars.
    ax.patch.set_visible(False)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="calibrated")
    ax.plot(
        bins.mean_confidence[filled],
        bins.accuracy[filled],
        color=_colors(1)[0],
        marker="o",
        label="predictions",
    )
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy")
    ax.legend(loc="upper left")
    return ax


def plot_images(
    ax: Axes | None,
    images: np.ndarray,
    captions: Sequence[str] | None = None,
    *,
    num_columns: int | None = None,
) -> Axes:
    """Draws images in a grid, dark on light, each with a caption below.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      images: `[num_images, height, width]`, larger is darker; all share one scale.
      captions: A line or more for each image, or None.
      num_columns: Images a row; all in one row if None.

    Returns:
      The axes.

    Raises:
      ValueError: Shapes or counts do not fit.
    """
    ax = _axes(ax)
    images = np.asarray(images, np.float64)
    if images.ndim != 3 or not len(images):
        raise ValueError(f"images of shape {images.shape}; expected [num_images, height, width]")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} images; give one each")
    num_columns = num_columns or len(images)
    num_rows = -(-len(images) // num_columns)
    height, width = images.shape[1:]
    lines = max((caption.count("\n") + 1 for caption in captions), default=0) if captions else 0
    row_height, column_width = height * (1.1 + 0.25 * lines), width * 1.1
    for index, image in enumerate(images):
        row, column = divmod(index, num_columns)
        left, top = column * column_width, row * row_height
        ax.imshow(
            image,
            cmap="Greys",
            vmin=images.min(),
            vmax=images.max(),
            extent=(left, left + width, top + height, top),
            interpolation="nearest",
        )
        if captions is not None:
            middle, below = left + width / 2, top + height * 1.03
            ax.text(middle, below, captions[index], ha="center", va="top", fontsize="small")
    ax.set_xlim(-0.05 * width, num_columns * column_width)
    ax.set_ylim(num_rows * row_height, -0.05 * height)
    ax.set_axis_off()
    return ax


def plot_device_layout(ax: Axes | None, array: "jax.Array") -> Axes:
    """Draws which device holds which block of an array.

    Args:
      ax: Axes to draw on, or None for a new figure's.
      array: JAX array of any sharding; axes after the second are not drawn.

    Returns:
      The axes: rows are the first axis of the array, columns the second. A block that several
      devices hold names them all; it is pale, and grey if all hold it.
    """
    ax = _axes(ax)
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        block = tuple(_bounds(part, size) for part, size in zip(index, array.shape))
        holders.setdefault((*block, (0, 1), (0, 1))[:2], []).append(device.id)
    devices = sorted({device for ids in holders.values() for device in ids})
    colors = dict(zip(devices, _colors(len(devices))))
    for ((top, bottom), (left, right)), ids in holders.items():
        ids = sorted(set(ids))
        first = devices.index(ids[0])
        shared_by_all = len(ids) == len(devices) > 1
        ax.add_patch(
            Rectangle(
                (left, top),
                right - left,
                bottom - top,
                facecolor="0.9" if shared_by_all else (*colors[ids[0]], 0.45 / len(ids)),
                edgecolor="black",
                hatch=_HATCHES[first % len(_HATCHES)] if len(ids) == 1 else None,
            )
        )
        ax.text(
            (left + right) / 2,
            (top + bottom) / 2,
            "all devices" if shared_by_all else ", ".join(map(str, ids)),
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    shape = (*array.shape, 1, 1)[:2]
    ax.set_xlim(0, shape[1])
    ax.set_ylim(shape[0], 0)
    ax.set_xlabel("axis 1" if array.ndim > 1 else "")
    ax.set_ylabel("axis 0" if array.ndim > 0 else "")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if array.ndim < 2:
        ax.set_xticks([])
    if array.ndim < 1:
        ax.set_yticks([])
    ax.set_title(f"shape {array.shape}, by holding device", fontsize="medium")
    return ax


def _axes(ax: Axes | None) -> Axes:
    return Figure(layout="constrained").subplots() if ax is None else ax


def _colors(count: int) -> list[tuple[float, float, float]]:
    return list(sns.color_palette("colorblind", count))


def _columns(name: str, values: np.ndarray, expected: str) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim not in (1, 2):
        raise ValueError(f"{name} of shape {values.shape}; expected {expected}")
    return values.reshape(len(values), -1)


def _draw_chains(ax: Axes, x: np.ndarray, values: np.ndarray) -> None:
    num_chains = values.shape[1]
    spacing = max(len(x) // 8, 1)
    for chain, color in enumerate(_colors(num_chains)):
        ax.plot(
            x,
            values[:, chain],
            color=color,
            linewidth=0.9,
            alpha=0.9,
            # Dashes cannot be seen in a jagged line, so chains differ in sparse markers.
            marker=_MARKERS[chain % len(_MARKERS)] if num_chains > 1 else None,
            markersize=5,
            markeredgecolor="black",
            markeredgewidth=0.5,
            markevery=(chain * spacing // num_chains, spacing),
            label=f"chain {chain}" if num_chains > 1 else None,
        )


def _finish(ax: Axes, xlabel: str, ylabel: str, **legend: object) -> Axes:
    """Names the axes, adds a legend where there is something to tell apart, and drops the frame.

    Lines of chains are left out of a long legend. `legend` holds Matplotlib's options for it, small
    type unless they say otherwise.
    """
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > _MAX_LEGEND_ENTRIES:
        kept = [pair for pair in zip(handles, labels) if not pair[1].startswith("chain ")]
        handles, labels = zip(*kept) if kept else ((), ())
    if labels:
        ax.legend(handles, labels, **{"fontsize": "small"} | legend)
    sns.despine(ax=ax)
    return ax


def _bounds(index: int | slice, size: int) -> tuple[int, int]:
    """Bounds of a block along one axis; pmap's shardings give an integer for a device axis."""
    if isinstance(index, slice):
        return index.indices(size)[:2]
    return int(index), int(index) + 1
