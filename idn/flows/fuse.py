"""Elementwise functions as one kernel each: `torch.compile`, where it is switched on and the machine has a compiler.

Compiling takes some seconds per process, so short runs do without. It is the same code on CPUs and GPUs.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_on = False


def fuse(on: bool) -> None:
    """Switches compiled kernels on or off for this process."""
    global _on
    _on = on


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function itself, or its compiled form while `fuse` is on; without a compiler it stays as it is."""
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if not _on:
            return function(*args, **kwargs)
        if compiled is None:
            compiled = _compiled(function)
        try:
            return compiled(*args, **kwargs)
        except _no_compiler() as error:
            logging.getLogger(__name__).warning("kernels are not compiled: %s", str(error).strip().splitlines()[0])
            fuse(False)
            return function(*args, **kwargs)

    return call


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    import torch._inductor.config as settings

    # A pool of compiling processes would cost more than these few kernels.
    settings.compile_threads = 1
    return torch.compile(function, dynamic=True, fullgraph=True)


def _no_compiler() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError

    kinds: tuple[Any, ...] = (BackendCompilerFailed, InductorError)
    return kinds
