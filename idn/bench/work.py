"""One side of a measurement in a process of its own, so that memory and allocator settings are its own."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F

from idn.flows import oracle
from idn.flows.block import Block
from idn.flows.build import make_config
from idn.flows.cost import flow_cost
from idn.flows.draws import Draws
from idn.flows.elementary import FactorOut, Layer
from idn.flows.files import load
from idn.flows.flow import PRECISIONS, Flow
from idn.flows.fuse import fuse
from idn.flows.inverse import GOAL, default_tolerance
from idn.flows.logdet import LogdetRule
from idn.memory import forget_peak, keep_freed_memory, resident, spare_collector
from idn.streams import stream


@dataclass(frozen=True)
class Job:
    """What to measure; `ours` or the plain estimators."""

    ours: bool
    work: Literal["train", "evaluate", "sample", "norms", "products"]
    dataset: str
    model: str
    size: str = "paper"
    batch: int = 16
    precision: str = "fp32"
    recompute: bool = False
    threads: int = 2
    clock: Literal["wall", "cpu"] = "wall"
    rule: LogdetRule | None = None
    """The plain side's rule in training, where it differs."""
    power_iterations: int = 1
    """The plain side's after each step."""
    steps: int = 1
    """In a row per repetition: short ones on their own would measure how a process wakes up."""
    overrides: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    """A file with a trained flow, instead of a new one."""
    keep_memory: bool = False
    """The plain side keeps freed memory as well; ours always does."""


@dataclass(frozen=True)
class Measured:
    """One repetition."""

    seconds: float
    peak: int
    """Most bytes held so far, above the bare process."""


class Worker:
    """A process that has built the job's flow and repeats its work on demand."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(job, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.flops: float = self.connection.recv()

    def repeat(self, seed: int) -> Measured:
        self.connection.send(seed)
        return self.connection.recv()

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def serve(job: Job, connection: Connection) -> None:
    """Does the job's work once per seed received, until the other end closes."""
    torch.set_num_threads(job.threads)
    clock = time.process_time if job.clock == "cpu" else time.perf_counter
    if job.ours or job.keep_memory:
        keep_freed_memory()
    fuse(job.ours)
    torch.optim.Adam([torch.zeros(1)])  # the first one loads modules, which are code and not memory of training
    bare, _ = resident()
    forget_peak()
    flow = trained_like(job)
    work = {"train": train, "evaluate": evaluate, "sample": sample, "norms": norms, "products": products}[job.work](
        job, flow
    )
    if job.ours:
        spare_collector()
    connection.send(flops(job, flow))
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        start = clock()
        for step in range(job.steps):
            work(job.steps * seed + step)
        seconds = (clock() - start) / job.steps
        connection.send(Measured(seconds, resident()[1] - bare))


def trained_like(job: Job) -> Flow:
    """A new flow with weights doubled, so that, as in a trained one, the bounds are active."""
    if job.weights is not None:
        return load(job.weights)
    flow = Flow(make_config(job.dataset, job.model, job.size, **job.overrides), converge=False)
    with torch.no_grad():
        for _, layer in flow.spectral_layers():
            layer.weight.mul_(2)
    flow.update_norms(3)
    flow.initialize(batch_of(flow, job.batch, -1))
    flow.recompute = job.recompute
    if job.ours:
        flow.set_precision(job.precision)
    return flow


def batch_of(flow: Flow, n: int, seed: int) -> torch.Tensor:
    draw = torch.rand if flow.config.logit_alpha is not None else torch.randn
    return draw(n, *flow.shape, generator=stream(seed, "bench"))


def flops(job: Job, flow: Flow) -> float:
    """Arithmetic of one repetition, in expectation."""
    number = PRECISIONS[job.precision] or torch.float32
    cost = flow_cost(flow, number.itemsize if job.ours else 0)
    if job.work == "train":
        return job.batch * cost.training_flops(job.recompute)
    return job.batch * (cost.evaluation_flops() if job.work == "evaluate" else 2 * cost.forward_flops)


def train(job: Job, flow: Flow) -> Callable[[int], None]:
    """A whole training step: likelihood, gradients, Adam, norms."""
    flow.train()
    adam = torch.optim.Adam(flow.parameters(), 1e-5, betas=(0.9, 0.99), fused=True if job.ours else None)

    def step(seed: int) -> None:
        x, draws = batch_of(flow, job.batch, seed), Draws.seeded(seed, "bench")
        found = flow(x, draws) if job.ours else oracle.likelihood(flow, x, draws, job.rule, saving=True)
        (-found.log_prob.mean()).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        if job.ours:
            flow.update_norms()
        else:
            for _, layer in flow.spectral_layers():
                for _ in range(job.power_iterations):
                    oracle.power_iteration(layer)

    return step


def evaluate(job: Job, flow: Flow) -> Callable[[int], None]:
    flow.eval()

    @torch.no_grad()
    def score(seed: int) -> None:
        x, draws = batch_of(flow, job.batch, seed), Draws.seeded(seed, "bench")
        _ = flow(x, draws) if job.ours else oracle.likelihood(flow, x, draws)

    return score


def sample(job: Job, flow: Flow) -> Callable[[int], None]:
    """Both sides solve every block to the same residual."""
    flow.eval()

    @torch.no_grad()
    def draw(seed: int) -> None:
        z = torch.randn(job.batch, flow.dims, generator=stream(seed, "bench"))
        tolerance = default_tolerance(z.dtype)
        for layer in reversed(flow.chain):
            if isinstance(layer, Block) and job.ours:
                # Ours goes on to a share of the tolerance it is given, and evaluates with other roundoff.
                z = layer.inverse(z, 0.9 * tolerance / GOAL)
            elif isinstance(layer, Block):
                z = oracle.fixed_point(oracle.plain(layer.branch), z, tolerance)
            elif not isinstance(layer, FactorOut):
                z = cast(Layer, layer).inverse(z)

    return draw


def norms(job: Job, flow: Flow) -> Callable[[int], None]:
    """Only what follows the optimiser's step. Weights go to and fro between two places, which takes no time itself."""
    generator = stream(0, "bench")
    layers = [layer for _, layer in flow.spectral_layers()]
    here = [layer.weight.data for layer in layers]
    there = [weight * (1 + 1e-4 * torch.randn(weight.shape, generator=generator)) for weight in here]

    @torch.no_grad()
    def follow(seed: int) -> None:
        for layer, weight in zip(layers, here if seed % 2 else there, strict=True):
            layer.weight.data = weight
        flow.update_norms()

    return follow


def products(job: Job, flow: Flow) -> Callable[[int], None]:
    """The roofline: the flow's own convolutions and matrix products, forward, points and tangents together, alone."""
    precision = PRECISIONS[job.precision] or torch.float32
    pairs = []
    for block, shape in block_shapes(flow):
        for layer in block.branch.spectral_layers():
            weight = layer.weight.detach().to(precision)
            size = () if layer.padding is None else shape[1:]
            rows = torch.randn(2 * job.batch, weight.shape[1], *size).to(precision)
            if layer.padding is not None:
                rows, weight = (t.contiguous(memory_format=torch.channels_last) for t in (rows, weight))
            pairs.append((rows, weight, layer.padding))

    @torch.no_grad()
    def multiply(seed: int) -> None:
        for rows, weight, padding in pairs:
            _ = F.linear(rows, weight) if padding is None else F.conv2d(rows, weight, padding=padding)

    return multiply


def block_shapes(flow: Flow) -> list[tuple[Block, tuple[int, ...]]]:
    """Every block with the shape of its input."""
    x, found = torch.zeros(1, *flow.shape), []
    for layer in flow.chain:
        if isinstance(layer, Block):
            found.append((layer, tuple(x.shape[1:])))
        elif isinstance(layer, FactorOut):
            x, _ = layer.split(x)
        else:
            x = layer(x, None, None)[0]
    return found
