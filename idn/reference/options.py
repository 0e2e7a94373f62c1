"""From a published checkpoint's options and tensor sizes to our configuration."""

from typing import Any

import torch

from idn.errors import UserError
from idn.flows.config import FlowConfig
from idn.flows.logdet import LogdetRule
from idn.reference.checkpoint import Checkpoint
from idn.reference.layout import Layout, Part, PublishedBlock, Step

ACTIVATIONS = {
    "swish": "lipswish",
    "CLipSwish": "clipswish",
    "relu": "relu",
    "elu": "elu",
    "tanh": "tanh",
    "identity": "identity",
}
ONLY_VALUE = {
    "arch": "iresnet",
    "block": "resblock",
    "task": "density",
    "padding": 0,
    "fc": False,
    "fc_actnorm": False,
    "batchnorm": False,
    "quadratic": False,
    "learn_p": False,
}
"""Options that change the model in ways that ours does not have."""
SIZES = {
    "idim": "width",
    "fc_idim": "fc_width",
    "densenet_depth": "depth",
    "densenet_growth": "growth",
    "fc_densenet_growth": "fc_growth",
}
"""Options that say what the tensors' sizes say as well, and our names for them."""


def check_options(args: dict[str, Any], where: str) -> None:
    """Refuses, by name, what cannot be imported."""
    for name, value in ONLY_VALUE.items():
        if args.get(name, value) != value:
            raise UserError(f"{where}: was trained with {name}={args[name]!r}; only {value!r} can be imported")
    if set(str(args.get("vnorms", 2))) != {"2"}:
        raise UserError(f"{where}: was trained with vnorms={args['vnorms']!r}; only '2222' can be imported")
    if args.get("act", "swish") not in list(ACTIVATIONS):
        expected = ", ".join(ACTIVATIONS)
        raise UserError(f"{where}: was trained with act={args['act']!r}; only {expected} can be imported")


def read_config(checkpoint: Checkpoint, layout: Layout, where: str) -> FlowConfig:
    """Sizes come from the tensors, the rest from the options; where both speak they must agree."""
    args, first = checkpoint.args, layout.blocks()[0]
    sizes = _image_sizes(checkpoint, layout, where) if layout.is_image else _vector_sizes(layout)
    for option, size in SIZES.items():
        if size in sizes and args.get(option, sizes[size]) != sizes[size]:
            raise _disagree(where, option, args[option], sizes[size])
    blocks = [str(count) for count in sizes["blocks"]]
    # The scripts drop the scales that would halve the image too often.
    if str(args.get("nblocks", "-".join(blocks))).split("-")[: len(blocks)] != blocks:
        raise _disagree(where, "nblocks", args["nblocks"], "-".join(blocks))
    try:
        return FlowConfig(
            **sizes,
            branch="dense" if first.concatenations else "residual",
            learnable_concat=bool(first.concatenations) and _is_learnt(checkpoint, first.concatenations[0]),
            activation=_activation(args, first),
            coeff=_number(args, "coeff", 0.98 if layout.is_image else 0.9),
            concat_coeff=_number(args, "lip_coeff", 0.98),
            actnorm=len(layout.steps()) > len(layout.blocks()),
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _image_sizes(checkpoint: Checkpoint, layout: Layout, where: str) -> dict[str, Any]:
    args, blocks = checkpoint.args, layout.blocks()
    connected = [block for block in blocks if block.flattens]
    first = blocks[0]
    channels, (height, width) = first.layers[-1].outputs, _map_size(first, where)
    squeeze_first = args.get("squeeze_first") is True
    if squeeze_first:
        channels, height, width = channels // 4, 2 * height, 2 * width
    # The scripts take 1e-6 for MNIST, their only dataset of one channel.
    alpha = 1e-6 if channels == 1 else 0.05
    sizes: dict[str, Any] = {
        "shape": (channels, height, width),
        "blocks": tuple(sum(_is_convolutional(step) for step in scale) for scale in layout.scales),
        "fc_blocks": len(connected),
        "logit_alpha": alpha if checkpoint.logit_alpha is None else checkpoint.logit_alpha,
        "squeeze_first": squeeze_first,
        "factor_out": args.get("factor_out") is True,
    }
    if first.concatenations:
        sizes |= {"depth": len(first.concatenations), "growth": _growth(first.layers)}
        if connected:
            stem, *rest = connected[0].layers
            sizes |= {"fc_stem": stem.outputs, "fc_growth": _growth(rest)}
        return sizes
    if not all(block.starts_with_activation for block in blocks[1:]):
        raise UserError(f"{where}: was trained with preact=False; only preact=True can be imported")
    sizes |= {
        "width": first.layers[-1].inputs,
        "kernels": tuple(layer.kernel for layer in first.layers),
        "first_activation": first.starts_with_activation,
    }
    return sizes | ({"fc_width": connected[0].layers[-1].inputs} if connected else {})


def _is_convolutional(step: Step) -> bool:
    return isinstance(step, PublishedBlock) and not step.flattens


def _map_size(block: PublishedBlock, where: str) -> tuple[int, int]:
    """Height and width of the maps that a block sees, as they are noted and as the length of v bears out."""
    for layer in block.layers:
        size = layer.tensors.get("spatial_dims", torch.zeros(0)).long().tolist()
        if layer.kernel > 1 and len(size) == 2 and layer.inputs * size[0] * size[1] == layer["v"].numel() > 0:
            return size[0], size[1]
    raise UserError(f"{where}: {block.path} holds no convolution that shows the size of its images")


def _vector_sizes(layout: Layout) -> dict[str, Any]:
    first, exact = layout.blocks()[0], LogdetRule("exact")
    sizes: dict[str, Any] = {
        "shape": (first.layers[-1].outputs,),
        "blocks": (len(layout.blocks()),),
        "logit_alpha": None,
        "train_logdet": exact,
        "eval_logdet": exact,
    }
    if first.concatenations:
        return sizes | {"depth": len(first.concatenations), "growth": _growth(first.layers)}
    return sizes | {"width": first.layers[-1].inputs, "hidden": len(first.layers) - 1}


def _growth(layers: list[Part]) -> int:
    """Each layer of a dense branch sees so many features more than the one before."""
    return layers[1].inputs - layers[0].inputs if len(layers) > 1 else 0


def _activation(args: dict[str, Any], block: PublishedBlock) -> str:
    """By name, or, where the options are lost, by the parameter that it has."""
    if "act" in args:
        return ACTIVATIONS[args["act"]]
    if not block.activations:
        raise UserError("its options do not name the activation (act), nor do its tensors show it")
    return "clipswish" if block.activations[0].path.endswith(".swish") else "lipswish"


def _is_learnt(checkpoint: Checkpoint, concatenation: Part) -> bool:
    """The factors are parameters with LC, and else buffers, of which no average is kept."""
    if checkpoint.ema:
        return f"{concatenation.path}.K1_unnormalized" in checkpoint.ema
    return checkpoint.args.get("learnable_concat", True) is True


def _number(args: dict[str, Any], name: str, default: float) -> float:
    value = args.get(name, default)
    if not isinstance(value, int | float):
        raise UserError(f"its options say {name}={value!r}, expected a number")
    return float(value)


def _disagree(where: str, option: str, claimed: object, found: object) -> UserError:
    return UserError(f"{where}: its options say {option}={claimed!r}, but its tensors {found!r}: the file is damaged")
