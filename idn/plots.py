"""Pictures as a paper would print them, from plain arrays; each function returns an RGB picture."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

Picture = Image.Image
DPI = 120
SCALE_TITLES = {"scale1": "scale 1", "scale2": "scale 2", "scale3": "scale 3", "fc": "FC", "toy": "all blocks"}


def grid(images: np.ndarray, columns: int | None = None, scale: int = 4, gap: int = 1) -> Picture:
    """N x H x W x C bytes as one sheet, enlarged without smoothing."""
    count, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    picture = Image.fromarray(sheet)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def reconstructions(originals: np.ndarray, again: np.ndarray, error: float) -> Picture:
    """Originals above what the inverse makes of their codes, and the difference, 50 times as bright."""
    difference = np.abs(originals.astype(np.int16) - again.astype(np.int16)) * 50
    rows = np.concatenate([originals, again, difference.clip(0, 255).astype(np.uint8)])
    names = ["original", "decoded", "50 x difference"]
    return _framed(grid(rows, columns=len(originals), scale=2), f"largest relative error {error:.1e}", names)


def sheet(images: np.ndarray, title: str, columns: int | None = None) -> Picture:
    """A grid of images with a title."""
    scale = max(1, 96 // images.shape[1])
    return _framed(grid(images, columns, scale), title)


def density(
    values: np.ndarray, data: np.ndarray | None, samples: np.ndarray, title: str, extent: float = 4.0
) -> Picture:
    """A 2-D flow's density beside samples of the data, where it is known, and of the flow (the paper's Figure 2)."""
    pyplot = pyplot_module()
    count = 2 if data is None else 3
    figure, axes = pyplot.subplots(1, count, figsize=(4.1 * count + 0.2, 4.2), layout="constrained")
    box = (-extent, extent, -extent, extent)
    clouds = [] if data is None else [(axes[0], data, "data")]
    for panel, points, name in [*clouds, (axes[-1], samples, "samples")]:
        panel.hist2d(points[:, 0], points[:, 1], bins=100, range=((-extent, extent),) * 2, cmap="viridis")
        panel.set_title(name)
    shown = axes[-2].imshow(values.T, origin="lower", extent=box, cmap="viridis")
    axes[-2].set_title("density")
    figure.colorbar(shown, ax=axes[-2], shrink=0.8, label="p(x)")
    for panel in axes:
        _square(panel, extent)
    figure.suptitle(title)
    return finish(figure)


def points(panels: Mapping[str, np.ndarray], title: str, extent: float = 4.0) -> Picture:
    """Clouds of points side by side."""
    pyplot = pyplot_module()
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.6), squeeze=False, layout="constrained"
    )
    for (name, cloud), panel in zip(panels.items(), axes[0], strict=True):
        panel.scatter(cloud[:, 0], cloud[:, 1], s=max(1.0, min(12.0, 6000 / len(cloud))), linewidths=0, alpha=0.7)
        panel.set_title(name)
        _square(panel, extent)
    figure.suptitle(title)
    return finish(figure)


def paths(values: np.ndarray, ways: np.ndarray, title: str, extent: float = 4.0) -> Picture:
    """Ways between points (pairs x steps x 2) over a density."""
    pyplot = pyplot_module()
    figure, axes = pyplot.subplots(figsize=(5.6, 4.8), layout="constrained")
    shown = axes.imshow(values.T, origin="lower", extent=(-extent, extent, -extent, extent), cmap="viridis")
    for way in ways:
        axes.plot(way[:, 0], way[:, 1], ".-", color="white", linewidth=1, markersize=3)
        axes.plot(way[[0, -1], 0], way[[0, -1], 1], "o", color="tab:red", markersize=5)
    _square(axes, extent)
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(shown, ax=axes, shrink=0.8, label="p(x)")
    return finish(figure)


def eta_maps(etas: Sequence[Mapping[str, Any]], which: str, title: str = "") -> Picture:
    """Learned eta-hat 1 or 2: one panel per scale, layers (a, b, c, ...) against blocks (the paper's Appendix C)."""
    pyplot = pyplot_module()
    scales = list(dict.fromkeys(eta["scale"] for eta in etas))
    blocks = {scale: sorted({eta["block"] for eta in etas if eta["scale"] == scale}) for scale in scales}
    ratios = [max(len(blocks[scale]), 2) for scale in scales]
    figure, panels = pyplot.subplots(
        1,
        len(scales),
        figsize=(max(2.4 + 0.55 * sum(ratios), 5.0), 3.2),
        width_ratios=ratios,
        squeeze=False,
        layout="constrained",
    )
    for scale, axes in zip(scales, panels[0], strict=True):
        own = [eta for eta in etas if eta["scale"] == scale]
        layers = sorted({eta["layer"] for eta in own})
        values = np.full((len(layers), len(blocks[scale])), np.nan)
        for eta in own:
            values[layers.index(eta["layer"]), blocks[scale].index(eta["block"])] = eta[which]
        shown = axes.imshow(values, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            colour = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(blocks[scale])), [str(block) for block in blocks[scale]])
        axes.set_yticks(range(len(layers)), [chr(ord("a") + layer - 1) for layer in layers])
        axes.set_xlabel("block")
        axes.set_title(SCALE_TITLES.get(scale, scale))
    figure.colorbar(shown, ax=panels[0].tolist(), label=rf"$\hat{{\eta}}_{which[-1]}$")
    if title:
        figure.suptitle(title)
    return finish(figure)


def png(picture: Picture) -> bytes:
    """The picture as a file's content."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _framed(sheet: Picture, title: str, rows: Sequence[str] = ()) -> Picture:
    """A sheet of images, pixel for pixel, under a title and beside the names of its rows."""
    pyplot = pyplot_module()
    size = (max(sheet.width / DPI + 1.4 * bool(rows) + 0.2, 4.5), sheet.height / DPI + 0.7)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.imshow(sheet, interpolation="nearest")
    axes.set_yticks([sheet.height / len(rows) * (i + 0.5) for i in range(len(rows))] if rows else [], rows)
    axes.set_xticks([])
    axes.set_title(title)
    axes.spines[:].set_visible(False)
    return finish(figure)


def _square(axes: Any, extent: float) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(-extent, extent)
    axes.set_ylim(-extent, extent)


def pyplot_module() -> Any:
    """matplotlib takes a second to import and must not look for a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    pyplot_module().close(figure)
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")
