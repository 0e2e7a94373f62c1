"""Functions as few kernels: `torch.compile`, where it is switched on and the machine has a compiler.

Compiling takes some seconds per process, so short runs do without. It is the same code on CPUs and GPUs.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

WORTHWHILE = 2**16
"""Numbers in the first argument; on fewer, calling a kernel takes longer than its work."""
VARIANTS = 32
"""Most variants of a kernel: layouts, precisions, with tangents or without."""

_on = False


def fuse(on: bool) -> None:
    """Switches compiled kernels on or off for this process."""
    global _on
    _on = on


def is_fusing() -> bool:
    """Whether compiled kernels are on."""
    return _on


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function itself, or while `fuse` is on its compiled form for large tensors, if there is a compiler."""
    compiled = fused_or(function, function, dynamic=True)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        large = cast(Tensor, args[0]).numel() >= WORTHWHILE
        return (compiled if large else function)(*args, **kwargs)

    return call


def fused_or(function: Callable[P, R], otherwise: Callable[P, R], dynamic: bool = False) -> Callable[P, R]:
    """The compiled function while `fuse` is on, and another without a compiler; `dynamic`: one kernel for all sizes."""
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if not _on:
            return otherwise(*args, **kwargs)
        if compiled is None:
            compiled = _compiled(function, dynamic)
        try:
            return compiled(*args, **kwargs)
        except _compile_errors() as error:
            logging.getLogger(__name__).warning("kernels are not compiled: %s", str(error).strip().splitlines()[0])
            fuse(False)
            return otherwise(*args, **kwargs)

    return call


def _compiled(function: Callable[P, R], dynamic: bool) -> Callable[P, R]:
    import torch._inductor.config as settings

    # A pool of compiling processes would cost more than these few kernels.
    settings.compile_threads = 1
    torch._dynamo.config.recompile_limit = VARIANTS
    # As many channels as pixels in a row is chance, not a kernel of its own.
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(function, dynamic=dynamic or None, fullgraph=True)


def _compile_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
    from torch._inductor.exc import InductorError

    return BackendCompilerFailed, FailOnRecompileLimitHit, InductorError
