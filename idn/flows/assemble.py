"""From a configuration to the chain of layers (Appendix B)."""

from collections.abc import Iterator

from torch import nn

from idn.flows.block import Block
from idn.flows.branches import LayerMaker
from idn.flows.config import FlowConfig
from idn.flows.elementary import ActNorm, FactorOut, Flatten, Layer, Logit, Squeeze
from idn.streams import stream


def assemble(config: FlowConfig, converge: bool = True) -> nn.ModuleList:
    """All layers of the flow in the order in which x passes through them."""
    maker = LayerMaker(
        config.coeff,
        config.concat_coeff,
        config.learnable_concat,
        config.activation,
        stream(config.seed, "weights"),
        converge,
    )
    return nn.ModuleList((vector_layers if len(config.shape) == 1 else image_layers)(config, maker))


def normalised(config: FlowConfig, block: Block, channels: int) -> Iterator[Layer]:
    yield block
    if config.actnorm:
        yield ActNorm(channels)


def vector_layers(config: FlowConfig, maker: LayerMaker) -> Iterator[Layer]:
    """Blocks only, as the toy experiments have them; ActNorm is an option."""
    (dims,) = config.shape
    if config.logit_alpha is not None:
        yield Logit(config.logit_alpha)
    if config.actnorm:
        yield ActNorm(dims)
    for i in range(config.blocks[0]):
        if config.branch == "dense":
            branch = maker.dense_linear_branch(dims, config.depth, config.growth, stem=None)
        else:
            branch = maker.residual_linear_branch(dims, config.width, config.hidden, last_scale=1e-3)
        yield from normalised(config, Block(branch, f"block{i + 1}"), dims)


def image_layers(config: FlowConfig, maker: LayerMaker) -> Iterator[Layer | FactorOut]:
    """Logit, ActNorm, scales of blocks with a squeeze between them, and fully connected blocks at the end."""
    channels, height, width = config.shape
    if config.logit_alpha is not None:
        yield Logit(config.logit_alpha)
    if config.squeeze_first:
        yield Squeeze()
        channels, height, width = 4 * channels, height // 2, width // 2
    if config.actnorm:
        yield ActNorm(channels)
    for scale, blocks in enumerate(config.blocks, start=1):
        for i in range(blocks):
            if config.branch == "dense":
                branch = maker.dense_conv_branch(channels, (height, width), config.depth, config.growth)
            else:
                active = config.first_activation or (scale, i) != (1, 0)
                branch = maker.residual_conv_branch(channels, (height, width), config.width, active, config.kernels)
            yield from normalised(config, Block(branch, f"scale{scale}.block{i + 1}"), channels)
        if scale < len(config.blocks):
            yield Squeeze()
            channels, height, width = 4 * channels, height // 2, width // 2
            if config.factor_out:
                yield FactorOut()
                channels //= 2
    yield Flatten((channels, height, width))
    dims = channels * height * width
    for i in range(config.fc_blocks):
        if config.branch == "dense":
            branch = maker.dense_linear_branch(dims, config.depth, config.fc_growth, config.fc_stem)
        else:
            branch = maker.residual_linear_branch(dims, config.fc_width, hidden=2)
        yield from normalised(config, Block(branch, f"fc.block{i + 1}"), dims)
