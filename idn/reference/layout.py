"""The parts of a published model in their order, found by the names of its tensors.

An image flow's tensors are named transforms.SCALE.chain.STEP..., a 2-D flow's chain.STEP.... A step is an ActNorm,
a block whose branch is under nnet, or (logit, squeeze) has no tensors. The parts of a branch count up from 0, so
sorting by number gives their order.
"""

import re
from dataclasses import dataclass, field

from torch import Tensor

from idn.errors import UserError

STEP = re.compile(r"(transforms\.(?P<scale>\d+)\.)?chain\.\d+(?=\.|$)")
ROULETTE = {"geom_p", "lamb", "last_n_samples", "last_firmom", "last_secmom"}
LAYER = {"weight", "bias", "u", "v"}
CONVOLUTION = LAYER | {"scale", "initialized", "spatial_dims"}
NORM = {"weight", "bias", "initialized"}
CONCATENATION = {"K1_unnormalized", "K2_unnormalized"}


@dataclass(frozen=True, eq=False)
class Part:
    """One published module: where it is, and its tensors by their own names."""

    path: str
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def inputs(self) -> int:
        return self["weight"].shape[1]

    @property
    def kernel(self) -> int:
        """The size of a convolution's kernel; 0 for a linear layer."""
        return self["weight"].shape[3] if self["weight"].dim() == 4 else 0

    @property
    def outputs(self) -> int:
        return self["weight"].shape[0]


@dataclass(eq=False)
class PublishedBlock:
    """The parts of one block's branch, by kind."""

    path: str
    layers: list[Part] = field(default_factory=list)
    activations: list[Part] = field(default_factory=list)
    concatenations: list[Part] = field(default_factory=list)

    @property
    def flattens(self) -> bool:
        """Whether this is one of the fully connected blocks that end an image flow."""
        return self.layers[0].path.startswith(f"{self.path}.nnet.nnet.")

    @property
    def starts_with_activation(self) -> bool:
        """A residual branch's first layer has number 0, or 1 after an activation."""
        return self.layers[0].path.endswith(".1")


Step = Part | PublishedBlock


@dataclass(frozen=True)
class Layout:
    """ActNorms (a Part each) and blocks of every scale, in order; a 2-D flow has one scale."""

    is_image: bool
    scales: tuple[tuple[Step, ...], ...]

    def steps(self) -> list[Step]:
        return [step for scale in self.scales for step in scale]

    def blocks(self) -> list[PublishedBlock]:
        return [step for step in self.steps() if isinstance(step, PublishedBlock)]


def read_layout(state: dict[str, Tensor], where: str) -> Layout:
    """Sorts a state dict into its parts; a tensor that belongs to none is a UserError."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        path, _, own_name = name.rpartition(".")
        modules.setdefault(path, {})[own_name] = tensor

    steps: dict[tuple[str | None, str], list[Part]] = {}
    for path in sorted(modules, key=_order):
        part, found = Part(path, modules[path]), STEP.match(path)
        if found is None:
            raise _unknown(part, where)
        steps.setdefault((found["scale"], found[0]), []).append(part)

    scales: dict[str | None, list[Step]] = {}
    for (scale, path), parts in steps.items():
        scales.setdefault(scale, []).append(_step(path, parts, where))
    layout = Layout(None not in scales, tuple(tuple(scale) for scale in scales.values()))
    if not layout.blocks() or (len(scales) > 1 and not layout.is_image):
        raise UserError(f"{where}: holds no chain of residual blocks (transforms.0.chain.2.nnet... or chain.0.nnet...)")
    return layout


def _step(path: str, parts: list[Part], where: str) -> Step:
    """What the modules of one step make together."""
    if len(parts) == 1 and parts[0].tensors.keys() == NORM and parts[0].path in (path, f"{path}.fc_module"):
        return parts[0]
    block = PublishedBlock(path)
    for part in parts:
        names = part.tensors.keys()
        if LAYER <= names <= CONVOLUTION and part["weight"].dim() in (2, 4):
            block.layers.append(part)
        elif names == {"beta"}:
            block.activations.append(part)
        elif names == CONCATENATION:
            block.concatenations.append(part)
        elif not (names <= ROULETTE and part.path == path):
            raise _unknown(part, where)
    if not block.layers:
        raise _unknown(parts[0], where)
    return block


def _order(path: str) -> list[tuple[int, str]]:
    """Numbers in a path compare as numbers."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in path.split(".")]


def _unknown(part: Part, where: str) -> UserError:
    names = ", ".join(sorted(part.tensors)[:7])
    return UserError(f"{where}: {part.path!r} holds {names}, which is no part of a Residual Flow or an i-DenseNet")
