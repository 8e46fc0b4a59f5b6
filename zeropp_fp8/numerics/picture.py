"""Maps of layers by steps, for pictures of numerics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def layer_map(axis: Any, layers: Mapping[str, Sequence[float]], steps: Sequence[int], title: str, unit: str) -> None:
    """Colours for {layer: a number of this unit per step}, green where many dB are good; NaN is white."""
    colors = "RdYlGn" if unit == "dB" else "viridis"
    image = axis.imshow(list(layers.values()), aspect="auto", interpolation="nearest", cmap=colors)
    axis.set_yticks(range(len(layers)), layers, fontsize=5)
    axis.set_xticks(range(len(steps)), steps, fontsize=6, rotation=90)
    axis.set(title=title, xlabel="step", ylabel="layer")
    axis.figure.colorbar(image, ax=axis, label=unit)


def height_of(layers: Mapping[str, Sequence[float]]) -> float:
    """Inches of a map in which names of layers can be read."""
    return 1 + 0.16 * len(layers)
