"""A published checkpoint as a flow of ours: the same numbers under other names."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from idn.errors import UserError
from idn.flows.activations import LipSwishActivation
from idn.flows.block import Block
from idn.flows.branches import Concatenation
from idn.flows.elementary import ActNorm
from idn.flows.flow import Flow
from idn.flows.layers import SpectralLayer
from idn.reference.checkpoint import Checkpoint, read_checkpoint
from idn.reference.layout import Layout, Part, PublishedBlock, read_layout
from idn.reference.options import check_options, read_config
from idn.reference.settle import settle
from idn.streams import stream

Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")

PARAMETERS = {"weight", "bias", "beta"}


def convert(path: str | Path) -> tuple[Flow, Flow | None]:
    """The flow in a published file, with its raw and, where the file has them, with its averaged weights.

    The raw weights are normalised by the u and v in the file, as they were in training. Those are not converged,
    and do not belong to the averaged weights, whose norms are iterated to convergence.
    """
    where = str(path)
    checkpoint = read_checkpoint(path)
    check_options(checkpoint.args, where)
    layout = read_layout(checkpoint.state, where)
    config = read_config(checkpoint, layout, where)
    raw = Flow(config, converge=False).eval()
    _fill(raw, layout, where)
    if not checkpoint.ema:
        return raw, None
    _check_average(checkpoint, where)
    averaged = Flow(config, converge=False).eval()
    _fill(averaged, read_layout(checkpoint.state | checkpoint.ema, where), where)
    generator = stream(0, "norms")
    # A large flow takes minutes; a terminal shows how far it is.
    for _, layer in tqdm(list(averaged.spectral_layers()), "norms of averaged weights", leave=False, disable=None):
        settle(layer, generator)
    return raw, averaged


def _check_average(checkpoint: Checkpoint, where: str) -> None:
    """All parameters have an average, and nothing else has one."""
    parameters = {name for name in checkpoint.state if name.rpartition(".")[2] in PARAMETERS}
    if lacking := sorted(parameters - checkpoint.ema.keys()):
        raise UserError(f"{where}: the parameter {lacking[0]!r} has no average: the file is damaged")
    if foreign := sorted(checkpoint.ema.keys() - checkpoint.state.keys()):
        raise UserError(f"{where}: the average {foreign[0]!r} is of no parameter: the file is damaged")


@torch.no_grad()
def _fill(flow: Flow, layout: Layout, where: str) -> None:
    """Copies all parts in their order; every size must fit."""
    ours = [layer for layer in flow.chain if isinstance(layer, ActNorm | Block)]
    theirs = layout.steps()
    first = ours[0]
    if isinstance(first, ActNorm) and isinstance(theirs[0], PublishedBlock):
        # Without first_resblock no ActNorm precedes the blocks; ours, still at zero, changes nothing.
        first.initialized.fill_(True)
        ours = ours[1:]
    for layer, step in _paired(ours, theirs, "layers", where):
        if isinstance(layer, ActNorm) and isinstance(step, Part):
            _copy(step, {"bias": layer.bias, "weight": layer.log_scale, "initialized": layer.initialized}, where)
        elif isinstance(layer, Block) and isinstance(step, PublishedBlock):
            _fill_block(layer, step, where)
        else:
            raise UserError(f"{where}: {step.path!r} is not where it is expected: the file is damaged")


def _fill_block(block: Block, step: PublishedBlock, where: str) -> None:
    modules = list(block.branch.modules())
    layers = [module for module in modules if isinstance(module, SpectralLayer)]
    activations = [module for module in modules if isinstance(module, LipSwishActivation)]
    concatenations = [module for module in modules if isinstance(module, Concatenation)]
    here = f"{where}: {step.path}"
    for layer, part in _paired(layers, step.layers, "weights", here):
        _copy(part, {"weight": layer.weight, "bias": layer.bias, "u": layer.u, "v": layer.v}, where)
        apply, _ = layer.operator(layer.weight)
        layer.sigma.copy_((layer.u * apply(layer.v)).sum())
        layer.slack.zero_()
    for activation, part in _paired(activations, step.activations, "learnt activations", here):
        _copy(part, {"beta": activation.raw_beta}, where)
    for concatenation, part in _paired(concatenations, step.concatenations, "concatenations", here):
        eta1, eta2 = concatenation.raw.split(1)
        _copy(part, {"K1_unnormalized": eta1, "K2_unnormalized": eta2}, where)


def _paired(ours: list[Ours], theirs: list[Theirs], what: str, where: str) -> Iterable[tuple[Ours, Theirs]]:
    if len(ours) != len(theirs):
        raise UserError(f"{where} has {len(theirs)} {what}, but by its first block and options {len(ours)}")
    return zip(ours, theirs, strict=True)


def _copy(part: Part, targets: dict[str, Tensor], where: str) -> None:
    """Copies tensors that have as many numbers as their places; u and v, flat in the file, also take our shape."""
    for name, target in targets.items():
        source = part[name]
        if source.numel() != target.numel() or (name == "weight" and source.shape != target.shape):
            raise UserError(
                f"{where}: {part.path}.{name} has shape {tuple(source.shape)}, expected {tuple(target.shape)} "
                "by the first block and the options"
            )
        if not torch.isfinite(source).all():
            raise UserError(f"{where}: {part.path}.{name} has values that are not finite: the run had failed")
        target.copy_(source.view_as(target))
