"""The paper's models by name: idn.build("cifar10", "idensenet-lc", "paper")."""

from dataclasses import replace
from typing import Any

from idn.errors import UserError
from idn.flows.config import FlowConfig
from idn.flows.flow import Flow
from idn.flows.logdet import LogdetRule

TOY = ("circles", "checkerboard", "moons", "8gaussians", "pinwheel", "2spirals", "swissroll", "rings")
IMAGES = ("mnist", "cifar10", "fashion-mnist", "mnist-sample", "cifar10-sample")
MODELS = ("residual", "idensenet", "idensenet-lc")
SIZES = ("tiny", "paper", "full")


def toy_config(size: str) -> FlowConfig:
    """Spec of Appendix B, "Toy data": 10 blocks (paper), 100 blocks (full)."""
    rule = LogdetRule("exact")
    return FlowConfig(
        shape=(2,),
        blocks={"tiny": (4,), "paper": (10,), "full": (100,)}[size],
        depth=2 if size == "tiny" else 4,
        growth=32 if size == "tiny" else 90,
        width=34 if size == "tiny" else 128,
        hidden=2 if size == "tiny" else 4,
        coeff=0.9,
        logit_alpha=None,
        actnorm=False,
        train_logdet=rule,
        eval_logdet=rule,
    )


def mnist_config(size: str) -> FlowConfig:
    """28x28 digits resized to 32x32, coefficient 0.93."""
    base = FlowConfig(shape=(1, 32, 32), coeff=0.93, logit_alpha=1e-6)
    return image_size(base, size, paper_growth=108, full_growth=152, tiny=(16, 51))


def cifar10_config(size: str) -> FlowConfig:
    """32x32 colour images, coefficient 0.98."""
    base = FlowConfig(shape=(3, 32, 32), coeff=0.98, logit_alpha=0.05)
    return image_size(base, size, paper_growth=124, full_growth=172, tiny=(16, 39))


def image_size(base: FlowConfig, size: str, paper_growth: int, full_growth: int, tiny: tuple[int, int]) -> FlowConfig:
    """4-4-4 blocks (paper), 16-16-16 with CLipSwish (full), and narrow 2-2 ones on quarters of the pixels (tiny)."""
    if size == "full":
        return replace(base, blocks=(16, 16, 16), growth=full_growth, activation="clipswish")
    if size == "paper":
        return replace(base, blocks=(4, 4, 4), growth=paper_growth)
    growth, width = tiny  # chosen for equal numbers of parameters
    narrow = replace(base, blocks=(2, 2), squeeze_first=True, growth=growth, width=width)
    return replace(narrow, fc_blocks=1, fc_width=14, fc_stem=8, fc_growth=4)


def make_config(dataset: str, model: str, size: str = "paper", **overrides: Any) -> FlowConfig:
    """The complete configuration of a named model; `overrides` are fields of FlowConfig."""
    if dataset not in TOY + IMAGES:
        raise UserError(f"unknown dataset {dataset!r}; expected one of {', '.join(TOY + IMAGES)}")
    if model not in MODELS:
        raise UserError(f"unknown model {model!r}; expected one of {', '.join(MODELS)}")
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}; expected one of {', '.join(SIZES)}")
    family = toy_config if dataset in TOY else mnist_config if "mnist" in dataset else cifar10_config
    config = family(size)
    if model == "residual":
        # The published full-size Residual Flow keeps LipSwish.
        config = replace(config, branch="residual", activation="lipswish")
    config = replace(config, learnable_concat=model == "idensenet-lc")
    return FlowConfig.from_dict(config.to_dict() | overrides)


def build(dataset: str, model: str, size: str = "paper", **overrides: Any) -> Flow:
    """A new flow for a dataset.

    >>> flow = build("moons", "idensenet-lc", "paper", blocks=(2,))
    >>> flow.shape
    (2,)
    """
    return Flow(make_config(dataset, model, size, **overrides))
