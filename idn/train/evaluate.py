"""Evaluation on a Ray cluster: every worker scores its share and sends the sums of each batch as it goes."""

import os
from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import Tensor

from idn.errors import UserError
from idn.evaluate import partial_sums
from idn.flows.config import FlowConfig
from idn.flows.flow import Flow
from idn.splits import Split
from idn.train import trainer


def sums_on_ray(
    flow: Flow, split: Split, passes: int, exact: bool, workers: int, address: str | None
) -> Iterator[Tensor]:
    """The sums of all workers' batches, in the order in which they finish."""
    with trainer.cluster(address):
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        state = ray.put({name: tensor.cpu().numpy() for name, tensor in flow.state_dict().items()})
        task: Any = ray.remote(num_cpus=1, num_gpus=gpus, num_returns="streaming")(score_share)
        settings = {"config": flow.config.to_dict(), "split": vars(split), "environment": trainer.environment()}
        waiting: list[Any] = [task.remote(settings, state, passes, exact, rank, workers) for rank in range(workers)]
        while waiting:
            first: Any = ray.wait(waiting, num_returns=1)[0][0]
            try:
                yield torch.from_numpy(ray.get(next(first)).copy())
            except StopIteration:
                waiting.remove(first)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from error
                raise


def score_share(
    settings: dict[str, Any], state: dict[str, Any], passes: int, exact: bool, rank: int, workers: int
) -> Iterator[Any]:
    """What Ray runs in every worker."""
    os.environ.update(settings["environment"])
    flow = Flow(FlowConfig.from_dict(settings["config"]), converge=False)
    flow.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})
    flow.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    split = Split(**settings["split"])
    for sums in partial_sums(flow, split.batches(rank, workers), split.seed, passes, exact):
        yield sums.numpy()
