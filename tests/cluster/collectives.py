"""How long a worker sits in torch.distributed, how much it sends there, and how much of that during backward."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TIMED = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass
class Traffic:
    """Sums over all collectives of a stretch of training."""

    seconds: float = 0.0
    """Waiting for the slower rank included."""
    bytes: int = 0
    bytes_in_backward: int = 0


@contextmanager
def timed_collectives() -> Iterator[Traffic]:
    """Counts every collective of this process meanwhile."""
    traffic = Traffic()
    originals = {name: getattr(dist, name) for name in TIMED}
    for name, original in originals.items():
        setattr(dist, name, timed(original, traffic))
    try:
        yield traffic
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def timed(original: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        size = max((tensor.nbytes for tensor in tensors([*arguments, *named.values()])), default=0)
        # Inside backward autograd has a task; gradient hooks that reduce run there.
        in_backward = torch._C._current_graph_task_id() != -1
        before = time.perf_counter()
        result = original(*arguments, **named)
        traffic.seconds += time.perf_counter() - before
        traffic.bytes += size
        traffic.bytes_in_backward += size * in_backward
        return result

    return call


def tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(list(value))


def transfer_seconds(size: int, repeats: int = 7) -> float:
    """An all-reduce of so many bytes when nobody is late: the best of a few."""
    gradients = torch.ones(max(1, size // 4))
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        before = time.perf_counter()
        dist.all_reduce(gradients)
        best = min(best, time.perf_counter() - before)
    return best
