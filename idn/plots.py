"""Pictures as a paper would print them, from plain arrays; each function returns an RGB picture."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

Picture = Image.Image
DPI = 120


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
    pyplot = _pyplot()
    sheet = grid(rows, columns=len(originals), scale=2)
    figure, axes = pyplot.subplots(figsize=(sheet.width / DPI + 1.4, sheet.height / DPI + 0.7), layout="constrained")
    axes.imshow(sheet)
    height = sheet.height / 3
    axes.set_yticks([height * (i + 0.5) for i in range(3)], ["original", "decoded", "50 x difference"])
    axes.set_xticks([])
    axes.set_title(f"largest relative error {error:.1e}")
    return _finish(figure)


def density(values: np.ndarray, data: np.ndarray, samples: np.ndarray, title: str, extent: float = 4.0) -> Picture:
    """A 2-D flow's density beside samples of the data and of the flow (the paper's Figure 2)."""
    pyplot = _pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    box = (-extent, extent, -extent, extent)
    for axes, points, name in ((left, data, "data"), (right, samples, "samples")):
        axes.hist2d(points[:, 0], points[:, 1], bins=100, range=((-extent, extent),) * 2, cmap="viridis")
        axes.set_title(name)
    shown = middle.imshow(values.T, origin="lower", extent=box, cmap="viridis")
    middle.set_title("density")
    figure.colorbar(shown, ax=middle, shrink=0.8, label="p(x)")
    for axes in (left, middle, right):
        axes.set_aspect("equal")
        axes.set_xlim(-extent, extent)
        axes.set_ylim(-extent, extent)
    figure.suptitle(title)
    return _finish(figure)


def eta_maps(etas: Sequence[Mapping[str, Any]], which: str) -> Picture:
    """Learned eta-hat 1 or 2: one panel per scale, layers (a, b, c, ...) against blocks (the paper's Appendix C)."""
    pyplot = _pyplot()
    scales = list(dict.fromkeys(eta["scale"] for eta in etas))
    blocks = {scale: sorted({eta["block"] for eta in etas if eta["scale"] == scale}) for scale in scales}
    ratios = [max(len(blocks[scale]), 2) for scale in scales]
    figure, panels = pyplot.subplots(
        1, len(scales), figsize=(1.6 + 0.55 * sum(ratios), 3.2), width_ratios=ratios, squeeze=False, layout="constrained"
    )
    for scale, axes in zip(scales, panels[0], strict=True):
        own = [eta for eta in etas if eta["scale"] == scale]
        layers = sorted({eta["layer"] for eta in own})
        values = np.full((len(layers), len(blocks[scale])), np.nan)
        for eta in own:
            values[layers.index(eta["layer"]), blocks[scale].index(eta["block"])] = eta[which]
        shown = axes.imshow(values, cmap="RdBu_r", vmin=0.3, vmax=1.0, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(blocks[scale])), [str(block) for block in blocks[scale]])
        axes.set_yticks(range(len(layers)), [chr(ord("a") + layer - 1) for layer in layers])
        axes.set_xlabel("block")
        axes.set_title(scale)
    figure.colorbar(shown, ax=panels[0].tolist(), label="normalised " + which.replace("eta", "eta "))
    return _finish(figure)


def png(picture: Picture) -> bytes:
    """The picture as a file's content."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _pyplot() -> Any:
    """matplotlib takes a second to import and must not look for a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(figure: Any) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    _pyplot().close(figure)
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")
