"""Pictures of numerics: panels below each other, and maps of layers by steps. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Sheet:
    """A picture to be.

    Args:
        heights: of its panels, in inches.
    """

    def __init__(self, heights: Sequence[float]) -> None:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        options = {"squeeze": False, "height_ratios": heights, "layout": "constrained"}
        self.figure, axes = pyplot.subplots(len(heights), 1, figsize=(10, 2 + sum(heights)), **options)
        self.axes = axes[:, 0]

    def layer_map(
        self, axis, layers: Mapping[str, Sequence[float]], steps: Sequence[int], title: str, colors: str
    ) -> None:
        """Colours for {layer: a number a step}; NaN is white."""
        image = axis.imshow(list(layers.values()), aspect="auto", interpolation="nearest", cmap=colors)
        axis.set_yticks(range(len(layers)), layers, fontsize=5)
        axis.set_xticks(range(len(steps)), steps, fontsize=6, rotation=90)
        axis.set_title(title, fontsize=9)
        self.figure.colorbar(image, ax=axis)

    def save(self, path: str) -> None:
        """
        Raises:
            OSError: the file cannot be written.
        """
        from matplotlib import pyplot

        self.figure.savefig(path, dpi=120)
        pyplot.close(self.figure)


def height_of(layers: Mapping[str, Sequence[float]]) -> float:
    """Inches of a map in which names of layers can be read."""
    return 1 + 0.16 * len(layers)
