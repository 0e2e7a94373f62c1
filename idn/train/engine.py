"""The optimiser step under DeepSpeed; no other module knows DeepSpeed.

Parameters stay fp32 here whatever the precision: low precision lives inside the flow's convolutions, and so does fp16's
loss scale. DeepSpeed's own fp16 and bf16 modes would round the parameters and break the Lipschitz bound.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idn.errors import UserError
from idn.flows.block import Block
from idn.flows.draws import Draws
from idn.flows.flow import Flow, Likelihood
from idn.train.averaging import Averaging
from idn.train.config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_IN_BUCKET = 20_000_000
BUCKETS = 8
"""Gradients are reduced in so many pieces at least, so that all but the last can travel while backward goes on."""
OURS = {
    "train_batch_size": "--batch",
    "train_micro_batch_size_per_gpu": "--batch and --accumulation",
    "gradient_accumulation_steps": "--accumulation",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "torch_autocast": "--precision",
    "amp": "--precision",
    "scheduler": "--warmup",
}
"""Settings that a DeepSpeed file may not change, and the options that do."""


def bucket_size(parameters: int) -> int:
    """Gradients that are reduced together; DeepSpeed takes even sizes only.

    >>> bucket_size(186_161), bucket_size(10**9)
    (23272, 20000000)
    """
    return min(MOST_IN_BUCKET, 2 * -(-parameters // (2 * BUCKETS)))


def deepspeed_config(config: TrainConfig, workers: int, parameters: int) -> dict[str, Any]:
    """DeepSpeed's config generated from ours; the user's file wins wherever both speak."""
    optimiser = config.optimiser
    generated: dict[str, Any] = {
        "train_batch_size": config.data.batch,
        "train_micro_batch_size_per_gpu": config.data.batch // workers // config.data.accumulation,
        "gradient_accumulation_steps": config.data.accumulation,
        "gradient_clipping": optimiser.clip,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": optimiser.lr,
                "betas": list(optimiser.betas),
                "weight_decay": optimiser.weight_decay,
                "torch_adam": True,
                "fused": True,
                "adam_w_mode": False,
            },
        },
        "zero_optimization": {
            "stage": config.engine.zero,
            "reduce_bucket_size": bucket_size(parameters),
            "allgather_bucket_size": bucket_size(parameters),
            # A stream of its own for reduction; CPUs have no streams.
            "overlap_comm": torch.cuda.is_available(),
        },
        "steps_per_print": None,
    }
    return _merge(generated, read_overrides(config.engine.deepspeed)) if config.engine.deepspeed else generated


def read_overrides(path: str) -> dict[str, Any]:
    """The user's DeepSpeed file, refused where it would contradict the run."""
    try:
        overrides = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--deepspeed {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"--deepspeed {path}: not JSON ({error})") from error
    if not isinstance(overrides, dict):
        raise UserError(f"--deepspeed {path}: expected a JSON object")
    for key, option in OURS.items():
        if key in overrides:
            raise UserError(f"--deepspeed {path}: {key!r} is set by {option}; remove it from the file")
    kind = overrides.get("optimizer", {}).get("type", "Adam")
    if kind not in ("Adam", "AdamW"):
        raise UserError(f"--deepspeed {path}: optimizer {kind!r}; checkpoints know the moments of Adam and AdamW only")
    return overrides


def _merge(base: dict[str, Any], wins: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in wins.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _deepspeed() -> ModuleType:
    """Import DeepSpeed late: it is slow, and it looks at the accelerator when imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
    import deepspeed

    # Its CPU collectives would be compiled here, for up to a minute; gloo needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Fragment(NamedTuple):
    """This rank's part of one parameter's moments: live views of flat pieces that start at `start`."""

    name: str
    start: int
    moments: dict[str, Tensor]


class Engine:
    """A flow wrapped by DeepSpeed: accumulate gradients, then update or discard."""

    def __init__(self, flow: Flow, config: TrainConfig, workers: int) -> None:
        deepspeed = _deepspeed()
        settings = deepspeed_config(config, workers, flow.parameter_count())
        self.flow = flow
        self.stage: int = settings["zero_optimization"]["stage"]
        self._zero = deepspeed.zero
        if self.stage == 3:
            # A branch hands its weights to a custom gradient, outside their own modules' forward: gather whole blocks.
            deepspeed.utils.set_z3_leaf_modules(flow, [Block])
        self._engine, *_ = deepspeed.initialize(model=flow, model_parameters=parameter_groups(flow), config=settings)
        self._base_lr: float = settings["optimizer"]["params"]["lr"]
        self._parameters: dict[str, Any] = dict(flow.named_parameters())
        self._averaging: Averaging | None = None
        if self.stage == 0 and workers > 1:
            # Without ZeRO, DeepSpeed reduces only after backward.
            self._engine.enable_backward_allreduce = False
            self._averaging = Averaging(flow.parameters(), settings["zero_optimization"]["reduce_bucket_size"])

    def accumulate(self, x: Tensor, draws: Draws, per_nat: float) -> Likelihood:
        """Forward and backward of one piece of the batch; the loss is -per_nat * mean log p(x)."""
        # At ZeRO 3 a block whose input needs no gradient would lose its weights before its own gradients are made.
        likelihood: Likelihood = self._engine(x.requires_grad_(self.stage == 3), draws)
        last = self._engine.is_gradient_accumulation_boundary()
        with self._averaging if self._averaging and last else nullcontext():
            self._engine.backward(-per_nat * likelihood.log_prob.mean())
        if not last:
            self._engine.step()
        return likelihood

    def update(self, lr_factor: float, concat_factor: float) -> float:
        """Adam's step; returns the gradient norm before clipping."""
        for group, factor in zip(self._engine.optimizer.param_groups, (lr_factor, concat_factor), strict=False):
            group["lr"] = self._base_lr * factor
        norm = self._gradient_norm() if self.stage == 0 else None
        self._engine.step()
        return float(self._engine.get_global_grad_norm() if norm is None else norm)

    def discard(self) -> None:
        """Drop non-finite gradients. ZeRO does so by itself; without ZeRO Adam would take them."""
        if self.stage == 0:
            self._engine.zero_grad()
            self._engine.micro_steps += 1
        else:
            self._engine.step()

    def gathered(self) -> AbstractContextManager[Any]:
        """Whole parameters on every rank, to be read only."""
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self._zero.GatheredParameters(list(self._parameters.values()))
        return gathered

    def fragments(self) -> Iterator[Fragment]:
        """The optimiser state that lives on this rank, in pieces of named parameters."""
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            if self.stage == 0:
                state = self._state_of(parameter)
                yield Fragment(name, 0, {key: state[key].view(-1) for key in MOMENTS})
            elif self.stage == 3:
                yield self._partition(name, parameter)
            elif parameter._hp_mapping is not None:
                yield self._slice(name, parameter._hp_mapping)

    def restore(self, moments: dict[str, dict[str, Tensor]], updates: int) -> None:
        """Take this rank's part out of whole moments, whichever number of ranks wrote them."""
        for fragment in self.fragments():
            for key, view in fragment.moments.items():
                whole = moments[fragment.name][key].view(-1)
                view.copy_(whole[fragment.start : fragment.start + view.numel()])
        for tensor in self._sharded_tensors():
            self._state_of(tensor)["step"].fill_(float(updates))

    def _gradient_norm(self) -> Tensor:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _sharded_tensors(self) -> list[Tensor]:
        """The tensors that Adam itself sees."""
        optimizer = self._engine.optimizer
        if self.stage == 0:
            return [p for p in self._parameters.values() if p.requires_grad]
        flat = optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        return list(flat)

    def _state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """Adam's state, made here when no step has made it yet."""
        optimizer = self._engine.optimizer if self.stage == 0 else self._engine.optimizer.optimizer
        state: dict[str, Tensor] = optimizer.state[tensor]
        if not state:
            state["step"] = torch.tensor(0.0, device=tensor.device if optimizer.defaults.get("fused") else "cpu")
            state.update({key: torch.zeros_like(tensor, requires_grad=False) for key in MOMENTS})
        return state

    def _slice(self, name: str, mapping: Any) -> Fragment:
        """ZeRO 1 and 2: each rank owns a range of one flat tensor, which cuts parameters anywhere."""
        state = self._state_of(self._sharded_tensors()[mapping.param_group_index])
        at = mapping.hp_fragment_address
        moments = {key: state[key].narrow(0, at.start, at.numel) for key in MOMENTS}
        return Fragment(name, mapping.lp_fragment_address.start, moments)

    def _partition(self, name: str, parameter: Any) -> Fragment:
        """ZeRO 3: each rank owns an equal part of every parameter, the last one padded."""
        optimizer = self._engine.optimizer
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        state = self._state_of(self._sharded_tensors()[group])
        start = size * torch.distributed.get_rank()
        real = max(0, min(size, parameter.ds_numel - start))
        return Fragment(name, start, {key: state[key].narrow(0, offset, real) for key in MOMENTS})


def parameter_groups(flow: Flow) -> list[dict[str, Any]]:
    """The learnable concatenation apart from the rest, so that it can be frozen by its learning rate."""
    concat = {id(p) for name, p in flow.named_parameters() if is_concat(name)}
    rest = [p for p in flow.parameters() if p.requires_grad and id(p) not in concat]
    learned = [p for p in flow.parameters() if p.requires_grad and id(p) in concat]
    return [{"params": rest}] + ([{"params": learned}] if learned else [])


def is_concat(name: str) -> bool:
    """Whether a parameter's name is that of a concatenation's raw eta."""
    return name.endswith("concatenation.raw")
