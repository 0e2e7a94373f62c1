"""Data: sources -> verified shards -> a stream that gives every sample exactly once; toy distributions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idn.data import toy
    from idn.data.pixels import dequantise
    from idn.data.stream import Batch, Stream, open_stream

__all__ = ["Batch", "Stream", "dequantise", "open_stream", "toy"]

_HOMES = {"Batch": "stream", "Stream": "stream", "open_stream": "stream", "dequantise": "pixels"}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `idn data info` does not wait for torch."""
    import importlib

    if name == "toy":
        return importlib.import_module("idn.data.toy")
    if name in _HOMES:
        return getattr(importlib.import_module(f"idn.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
