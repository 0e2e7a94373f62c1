"""What a flow costs, counted from its layers: arithmetic per sample, and memory of a training step.

With F for one forward pass of a branch (all its products, once per sample), a training step with K terms of
the series takes, per block:

    points and tangents          2 F      g(x) and J v
    power series             (K-1) F      (J^T)^k v; the last product is saved by J v
    gradients of inputs          2 F      of points and of tangents
    gradients of weights         2 F

Recomputation adds 2 F: the tangents come only in the backward pass, where the points are made again as well. Torch
keeps nothing for it, on whatever device. The kernel for dense branches of images (`dense_images.py`, on CPUs) keeps
what entered the last activations, for the points that it has room for, and adds about 1.3 F in fp32, 1.0 F in bf16.
An exact log-det has d tangents instead, and no series.
"""

import math
from dataclasses import dataclass

from idn.flows.activations import LipSwishActivation
from idn.flows.block import Block
from idn.flows.branches import Branch
from idn.flows.dense_images import FEW, ROOM
from idn.flows.elementary import FactorOut, Flatten, Squeeze
from idn.flows.flow import Flow
from idn.flows.logdet import LogdetRule

BYTES = 4
"""Parameters, gradients and what a flow keeps between its blocks are fp32."""
COPIES = 4
"""Weight, gradient and Adam's two moments."""


def expected_terms(rule: LogdetRule) -> float:
    """The expected number of terms of a series; with several roulette lengths, that of the longest."""
    if rule.rule != "roulette":
        return rule.terms
    # E[max] = sum_n P(max >= n), and the maximum of m draws is below n if all of them are.
    tail = (1 - (1 - rule.survival(n)) ** rule.samples for n in range(1, 200))
    return rule.exact_terms + sum(tail)


def products(rule: LogdetRule, dims: int, training: bool, recompute: bool = False, spared: float = 0.0) -> float:
    """How many times F one block takes per sample; of the points, recomputing is spared some of it."""
    if rule.rule in ("exact", "trace"):
        return (1 + dims) * (3 if training else 1)
    terms = expected_terms(rule)
    if not training:
        return 1 + rule.probes * terms
    passes = 3 * (1 + rule.probes) + rule.probes * (terms - 1)
    return passes + (1 + rule.probes - spared if recompute else 0)


@dataclass(frozen=True)
class BlockCost:
    """One block's share."""

    name: str
    forward_flops: float
    """One forward pass of the branch, per sample; a multiplication with its addition counts as two."""
    parameters: int
    dims: int
    """Numbers in the block's input, per sample."""
    kept: int
    """Numbers per point or tangent that the backward pass needs: what enters layers and activations."""
    entering: tuple[tuple[int, float], ...]
    """What enters activations, the last one first: numbers per point, and the arithmetic that makes them."""
    room: int
    """Bytes per point that recomputing may keep of them: none, unless the kernel for images knows the branch."""

    def remembered(self, kernel_bytes: int) -> tuple[float, float]:
        """Bytes per point that this kernel keeps, and the arithmetic that it is spared."""
        left, spared = float(self.room), 0.0
        for numbers, flops in self.entering if kernel_bytes else ():
            share = min(1.0, left / (kernel_bytes * numbers))
            left -= share * kernel_bytes * numbers
            spared += share * flops
        return self.room - left, spared


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step."""

    parameters: int
    """Weights, gradients and optimiser state."""
    kept: int
    """What all blocks keep for the backward pass."""
    working: int
    """What the largest block needs while it is worked on."""

    @property
    def total(self) -> int:
        return self.parameters + self.kept + self.working


@dataclass(frozen=True)
class Cost:
    """Arithmetic and memory of a flow."""

    blocks: tuple[BlockCost, ...]
    parameters: int
    """Trainable parameters of the whole flow."""
    train_logdet: LogdetRule
    eval_logdet: LogdetRule
    kernel_bytes: int = 0
    """Bytes of a number in the kernel for dense branches of images; 0 where it does not run."""

    @property
    def forward_flops(self) -> float:
        """All branches once, per sample."""
        return sum(block.forward_flops for block in self.blocks)

    def training_flops(self, recompute: bool = False) -> float:
        """One training step per sample, in expectation over the roulette."""
        return self._total(self.train_logdet, True, recompute)

    def evaluation_flops(self) -> float:
        """ln p(x) of one sample under the evaluation rule."""
        return self._total(self.eval_logdet, False, False)

    def _total(self, rule: LogdetRule, training: bool, recompute: bool) -> float:
        found = 0.0
        for block in self.blocks:
            spared = block.remembered(self.kernel_bytes)[1] / block.forward_flops
            found += block.forward_flops * products(rule, block.dims, training, recompute, spared)
        return found

    def training_memory(self, batch: int, recompute: bool = False) -> Memory:
        """An estimate for a batch of `batch` samples on one device, without the libraries' own needs."""
        rule = self.train_logdet
        tangents = self.blocks[0].dims if rule.rule in ("exact", "trace") and self.blocks else rule.probes
        rows = batch * (1 + tangents)
        whole = [rows * block.kept * BYTES for block in self.blocks]
        # When recomputing, a block keeps x, the probes and the series' w, and what the kernel remembers.
        inputs = [batch * (1 + 2 * tangents) * block.dims * BYTES for block in self.blocks]
        remembered = [batch * int(block.remembered(self.kernel_bytes)[0]) for block in self.blocks]
        return Memory(
            parameters=self.parameters * BYTES * COPIES,
            kept=sum(inputs + remembered if recompute else whole),
            working=2 * max(whole, default=0),
        )


def flow_cost(flow: Flow, kernel_bytes: int = 0) -> Cost:
    """Counts a flow's layers, with the image sizes they really work on.

    `kernel_bytes`: of a number in the kernel for dense branches of images, 0 where it does not run.

    >>> from idn.flows.config import FlowConfig
    >>> flow = Flow(FlowConfig(shape=(1, 4, 4), blocks=(1,), depth=1, growth=2, fc_blocks=0), converge=False)
    >>> cost = flow_cost(flow)
    >>> cost.forward_flops == 2 * (9 * 1 * 2 * 16 + 3 * 1 * 16)
    True
    """
    shape, blocks = flow.shape, []
    for layer in flow.chain:
        if isinstance(layer, Block):
            blocks.append(_block_cost(layer, shape))
        elif isinstance(layer, Squeeze):
            shape = (4 * shape[0], shape[1] // 2, shape[2] // 2)
        elif isinstance(layer, FactorOut):
            shape = (shape[0] // 2, *shape[1:])
        elif isinstance(layer, Flatten):
            shape = (math.prod(shape),)
    return Cost(tuple(blocks), flow.parameter_count(), flow.config.train_logdet, flow.config.eval_logdet, kernel_bytes)


def _block_cost(block: Block, shape: tuple[int, ...]) -> BlockCost:
    pixels = math.prod(shape[1:])
    weights = [layer.weight for layer in block.branch.spectral_layers()]
    dense = list(block.branch.dense_layers())
    known = len(shape) == 3 and bool(dense) and isinstance(dense[-1].activation, LipSwishActivation)
    # What few channels make is quickly made again.
    slow = [weight for weight in weights[-2::-1] if len(weight) < FEW * weight.shape[1]]
    return BlockCost(
        name=block.name,
        forward_flops=2.0 * pixels * sum(weight.numel() for weight in weights),
        parameters=sum(p.numel() for p in block.branch.parameters() if p.requires_grad),
        dims=math.prod(shape),
        kept=pixels * _kept_channels(block.branch),
        entering=tuple((pixels * len(weight), 2.0 * pixels * weight.numel()) for weight in slow),
        room=ROOM * pixels if known else 0,
    )


def _kept_channels(branch: Branch) -> int:
    """What enters layers and activations; dense layers share one buffer, which the last layer reads whole."""
    layers = list(branch.spectral_layers())
    dense = len(list(branch.dense_layers()))
    reading = layers[: -1 - dense] + layers[-1:] if dense else layers
    entering = sum(layer.weight.shape[1] for layer in reading)
    leaving = sum(layer.weight.shape[0] for layer in layers[:-1])
    return entering + leaving
