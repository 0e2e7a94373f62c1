"""The ranks of a run and the few things they tell each other outside DeepSpeed."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from idn.flows.flow import Flow


@dataclass(frozen=True)
class Group:
    """This worker among all workers."""

    rank: int
    workers: int
    device: torch.device
    node: int = 0
    """This worker's machine among the run's machines."""
    local_rank: int = 0
    """This worker among those of its machine."""

    def places(self) -> list[tuple[int, int]]:
        """Machine and local rank of every rank."""
        return [(int(node), int(local)) for node, local in self.gather([self.node, self.local_rank])]

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers, in rank order; exact for integers below 2**53."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.workers == 1:
            return [own.tolist()]
        all_ranks = [torch.empty_like(own) for _ in range(self.workers)]
        dist.all_gather(all_ranks, own)
        return torch.stack(all_ranks).tolist()

    def sum(self, total: Tensor) -> Tensor:
        """The sum over ranks, equal on all of them."""
        if self.workers == 1:
            return total
        moved = total.to(self.device)
        dist.all_reduce(moved)
        return moved.to(total.device)

    def from_first(self, value: str | None) -> str | None:
        """Rank 0's value."""
        holder = [value]
        if self.workers > 1:
            dist.broadcast_object_list(holder, src=0, device=self.device)
        return holder[0]

    def check_equal(self, named: dict[str, Tensor]) -> str | None:
        """The first tensor that differs between ranks, by an exact sum of its bits; None when all agree."""
        if self.workers == 1 or not named:
            return None
        own = torch.stack([bit_sum(tensor).to(self.device) for tensor in named.values()])
        all_ranks = [torch.empty_like(own) for _ in range(self.workers)]
        dist.all_gather(all_ranks, own)
        for index, name in enumerate(named):
            if len({int(sums[index]) for sums in all_ranks}) > 1:
                return name
        return None


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits read as integers: any single changed bit changes it."""
    flat = tensor.detach().contiguous().view(-1)
    sizes: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(sizes[flat.element_size()]).sum(dtype=torch.int64)


def replicated(flow: Flow, ema: dict[str, Tensor], whole_parameters: bool) -> dict[str, Tensor]:
    """What must be equal on all ranks: buffers, averages and, below ZeRO 3, parameters."""
    parameters = dict(flow.named_parameters()) if whole_parameters else {}
    averages = {f"ema/{name}": tensor for name, tensor in ema.items()}
    return parameters | dict(flow.named_buffers()) | averages
