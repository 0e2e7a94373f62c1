"""Gradients averaged over all ranks while the backward pass is still making the others."""

from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sent(NamedTuple):
    """A bucket on its way."""

    parameters: list[nn.Parameter]
    flat: Tensor
    work: dist.Work


class Averaging:
    """While entered, each bucket of gradients leaves as soon as backward has made all of it; leaving waits for all.

    Buckets leave in one order on all ranks, that of the backward pass: last parameters first.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket: int) -> None:
        self._buckets = cut([p for p in parameters if p.requires_grad][::-1], bucket)
        self._active = False
        for index, members in enumerate(self._buckets):
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._made(index))

    def __enter__(self) -> None:
        self._active, self._sent = True, list[Sent]()
        self._missing = [len(members) for members in self._buckets]

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._active = False
        if kind is not None:
            return
        while len(self._sent) < len(self._buckets):
            self._send()
        for parameters, flat, work in self._sent:
            work.wait()
            flat /= dist.get_world_size()
            pieces = flat.split([p.numel() for p in parameters])
            torch._foreach_copy_(gradients(parameters), [g.view_as(p) for g, p in zip(pieces, parameters, strict=True)])

    def _made(self, index: int) -> None:
        if not self._active:
            return
        self._missing[index] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        parameters = self._buckets[len(self._sent)]
        flat = torch.cat([gradient.flatten() for gradient in gradients(parameters)])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._sent.append(Sent(parameters, flat, work))


def cut(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Neighbours together, until there are `size` numbers."""
    buckets: list[list[nn.Parameter]] = []
    held = size
    for parameter in parameters:
        if held >= size:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.numel()
    return buckets


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradients to be read and written; zero where backward made none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
