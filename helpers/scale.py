"""One parameter for the size of a notebook's run: small enough to try, or as published."""

from collections.abc import Mapping
from typing import Any


def choose(scale: str, *, demo: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the settings of a scale, and prints them: a run says what it used.

    Args:
      scale: 'demo' or 'full'.
      demo: Settings by name for a run of minutes on a laptop.
      full: The same names with the published values.

    Returns:
      The settings of that scale.

    Raises:
      ValueError: `scale` is neither, or the two do not name the same settings.
    """
    if scale not in ("demo", "full"):
        raise ValueError(f"scale must be 'demo' or 'full', given {scale!r}")
    if demo.keys() != full.keys():
        odd = ", ".join(sorted(demo.keys() ^ full.keys()))
        raise ValueError(f"demo and full must name the same settings; only one has: {odd}")
    chosen = dict(demo if scale == "demo" else full)
    print(f"scale {scale}:", ", ".join(f"{name} {value}" for name, value in chosen.items()))
    return chosen
