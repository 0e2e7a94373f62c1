"""Gradients of two real processes, averaged while backward runs."""

from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from idn.train.averaging import Averaging, cut

WIDTHS = [3, 50, 7, 50, 2]


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(WIDTHS)]
    for parameter in nn.ModuleList(layers).parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return nn.Sequential(*layers, nn.Linear(2, 2, dtype=torch.float64))


def loss(net: nn.Sequential, rank: int, piece: int) -> torch.Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + piece), dtype=torch.float64)
    return net[:-1](x).square().mean()  # the last layer takes no part


def rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net, sent = model(), []
    averaging, all_reduce = Averaging(net.parameters(), bucket=100), dist.all_reduce

    def noted(tensor: torch.Tensor, async_op: bool) -> dist.Work | None:
        sent.append((tensor.numel(), torch._C._current_graph_task_id() != -1))
        return all_reduce(tensor, async_op=async_op)

    dist.all_reduce = noted
    loss(net, rank, 0).backward()
    assert not sent
    with averaging:
        loss(net, rank, 1).backward()
    torch.save(([p.grad for p in net.parameters()], sent), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_averages_are_those_of_all_ranks_and_leave_during_backward(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    (first, sent), (second, _) = (torch.load(tmp_path / f"{i}.pt") for i in range(2))
    net = model()
    (sum(loss(net, i, piece) for i in range(2) for piece in range(2)) / 2).backward()
    for parameter, one, two in zip(net.parameters(), first, second, strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(one, two)
        torch.testing.assert_close(one, expected)
    sizes = [size for size, _ in sent]
    assert len(sizes) > 3 and sum(sizes) == sum(p.numel() for p in net.parameters())
    # What takes no part is known to be zero only at the end, and with it the bucket that it shares.
    assert not sent[0][1]


def test_all_but_the_last_bucket_leave_before_backward_ends(tmp_path: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net, in_backward, all_reduce = model()[:-1], [], dist.all_reduce
        averaging = Averaging(net.parameters(), bucket=100)
        dist.all_reduce = lambda tensor, async_op: (
            in_backward.append(torch._C._current_graph_task_id() != -1) or all_reduce(tensor, async_op=async_op)
        )
        with averaging:
            loss(nn.Sequential(*net, nn.Identity()), 0, 0).backward()
        dist.all_reduce = all_reduce
    finally:
        dist.destroy_process_group()
    assert len(in_backward) > 3 and all(in_backward)


def test_buckets_hold_neighbours_and_everything_once() -> None:
    parameters = list(model().parameters())
    buckets = cut(parameters, 100)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in parameters]
    assert all(sum(p.numel() for p in bucket) >= 100 for bucket in buckets[:-1])
