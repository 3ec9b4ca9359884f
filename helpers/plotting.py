"""The figures of the notebooks: arrays in, matplotlib axes out.

Every function draws on the axes that it is given and returns them. Lines differ in dash and marker
as well as in colour, and the colours are seaborn's for the colour-blind, so that figures can be
read in grey too.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def plot_by_round(ax: Axes, curves: Mapping[str, np.ndarray], *, ylabel: str) -> Axes:
    """Draws quantities of a federated run against the round.

    Args:
      ax: Axes to draw on.
      curves: Values by name, each `[num_rounds]`; a single curve gets no legend.
      ylabel: What the values are.

    Returns:
      The axes.
    """
    colors = sns.color_palette("colorblind", len(curves))
    for index, (name, values) in enumerate(curves.items()):
        ax.plot(
            np.arange(len(values)),
            values,
            label=name,
            color=colors[index],
            linestyle=_DASHES[index % len(_DASHES)],
            marker=_MARKERS[index % len(_MARKERS)],
            markevery=max(len(values) // 10, 1),
            markersize=4,
        )
    ax.set_xlabel("round")
    ax.set_ylabel(ylabel)
    if len(curves) > 1:
        ax.legend()
    sns.despine(ax=ax)
    return ax


def plot_label_shares(ax: Axes, labels: Sequence[np.ndarray], *, num_classes: int = 10) -> Axes:
    """Draws which labels each client holds: a column a client, a row a label, darker is more.

    Args:
      ax: Axes to draw on.
      labels: For each client, integers `[num_examples]` from 0 to `num_classes - 1`.
      num_classes: Number of different labels.

    Returns:
      The axes.
    """
    counts = np.stack([np.bincount(client, minlength=num_classes) for client in labels], axis=1)
    shares = counts / counts.sum(axis=0)
    sns.heatmap(
        shares, ax=ax, cmap="Greys", vmin=0, vmax=1, cbar_kws={"label": "share of the client"}
    )
    ax.set_xlabel("client")
    ax.set_ylabel("label")
    ax.tick_params(axis="y", rotation=0)
    return ax
