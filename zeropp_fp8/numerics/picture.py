"""Pictures of numerics: panels below each other, and maps of layers by steps. They need matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path


def check_drawable(path: str) -> None:
    """Whether a picture can be written there, before what takes time is done.

    Raises:
        SystemExit: matplotlib is not installed, or does not write that format; there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("a picture needs matplotlib: pip install matplotlib, or leave --picture out")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    formats = FigureCanvasAgg.filetypes
    if Path(path).suffix[1:].lower() not in formats:
        raise SystemExit(f"--picture {path}: matplotlib writes {', '.join(sorted(formats))}; end the name with one")
    if not Path(path).parent.is_dir():
        raise SystemExit(f"--picture {path}: there is no folder {Path(path).parent}; make it first")


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
