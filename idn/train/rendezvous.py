"""Where workers meet: torch's store, on the address by which Ray knows rank 0's node and on no other.

Ray would let torch open it, which listens on all interfaces of the machine.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

_opened: list[dist.TCPStore] = []
"""Rank 0's store lives as long as its process."""


@dataclass
class Meeting(TorchConfig):
    """Ray's settings of torch's process group, with a store of ours."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Meeting


class _Meeting(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        place = worker_group.execute_single(0, open_store)
        worker_group.execute(_set_torch_distributed_env_vars)
        count = len(worker_group)
        settings = {"place": place, "workers": count, "backend": backend_config.backend}
        settings["seconds"] = backend_config.timeout_s
        ray.get([worker_group.execute_single_async(rank, join, own=rank, **settings) for rank in range(count)])


def open_store() -> tuple[str, int]:
    """On rank 0: the store's address and port."""
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port: int = listener.getsockname()[1]
    _opened[:] = [
        dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    ]
    return address, port


def join(place: tuple[str, int], own: int, workers: int, backend: str, seconds: float) -> None:
    """On every rank, whose `own` it is: the process group of all."""
    # Libraries look for these.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
    store = _opened[0] if own == 0 else dist.TCPStore(*place, is_master=False)
    dist.init_process_group(backend, store=store, rank=own, world_size=workers, timeout=timedelta(seconds=seconds))
