"""The authors' published checkpoints: read without running them, and turned into our own files."""

from pathlib import Path
from typing import Annotated

import tyro

from idn.reference.convert import convert

__all__ = ["convert", "import_checkpoint"]


def import_checkpoint(
    file: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.pth", help="checkpoint of either repository")
    ],
    out: Annotated[Path, tyro.conf.arg(help="where to write the flow (safetensors)")],
) -> None:
    """Turn a checkpoint of the published code (Residual Flows, i-DenseNets) into a flow; nothing in it is run."""
    raw, averaged = convert(file)
    raw.save(out, ema=None if averaged is None else averaged.state_dict())
    config = raw.config
    kind = "Residual Flow" if config.branch == "residual" else f"i-DenseNet{'+LC' if config.learnable_concat else ''}"
    blocks = "-".join(str(count) for count in config.blocks)
    weights = "raw weights" if averaged is None else "raw and averaged weights"
    size = "x".join(str(n) for n in config.shape)
    print(f"{out}: {kind}, {size}, {blocks} blocks, {raw.parameter_count():,} parameters, {weights}")
