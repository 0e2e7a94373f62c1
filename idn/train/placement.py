"""How many workers of which size a cluster can hold, by arithmetic, before anything would wait for ever."""

from dataclasses import dataclass

from idn.errors import UserError
from idn.train.config import TrainConfig, check_batch


@dataclass(frozen=True)
class Plan:
    """How many workers of which size."""

    fewest: int
    most: int
    cpus: float
    gpus: float


def fit(config: TrainConfig, nodes: list[dict[str, float]]) -> Plan:
    """Places the wanted workers on nodes, given as their resources."""
    cluster = config.cluster
    cpus, gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    gpu_share = cluster.gpus_per_worker if cluster.gpus_per_worker is not None else (1.0 if gpus else 0.0)
    has = f"the cluster has {cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} node{'s' * (len(nodes) != 1)}"
    if gpu_share and not gpus:
        raise UserError(f"--gpus-per-worker {gpu_share:g}: {has}")
    cpu_share = cluster.cpus_per_worker if cluster.cpus_per_worker is not None else 1.0

    def room(cpu: float) -> int:
        each = [
            [node.get("CPU", 0) // cpu] + ([node.get("GPU", 0) // gpu_share] if gpu_share else []) for node in nodes
        ]
        return int(sum(min(limits) for limits in each))

    wanted = config.worker_range
    if wanted is None:
        pieces = config.data.batch // config.data.accumulation
        count = max((n for n in range(1, room(cpu_share) + 1) if pieces % n == 0), default=0)
        if count == 0:
            raise UserError(f"--cpus-per-worker {cpu_share:g}: no worker fits, {has}")
        wanted = (count, count)
        check_batch(config, count)
    if wanted[0] > room(cpu_share):
        asked = f"--workers {config.cluster.workers} with {cpu_share:g} CPUs" + (
            f" and {gpu_share:g} GPUs" * bool(gpu_share)
        )
        raise UserError(
            f"{asked} each: {has}, room for {room(cpu_share)}; ask for fewer, or --wait SECONDS for more nodes"
        )
    if cluster.cpus_per_worker is None and not gpu_share:
        # Idle cores are of no use: share them out where they divide.
        while room(cpu_share + 1) >= wanted[1]:
            cpu_share += 1
    return Plan(*wanted, cpu_share, gpu_share)
