"""The other way round: from a run's config to the command that makes it."""

from typing import Any

from idn.train.config import TrainConfig
from idn.train.presets import preset

PLACES = ("saving.runs", "saving.storage", "cluster.address")
"""Where a run was kept says nothing about what it is."""
ASIDE = ("seed", "saving.", "watching.", "cluster.", "data.loaders", "data.limit_", "data.on_bad_sample", "engine.")
"""What does not change what is learned, apart from chance."""


def command(config: TrainConfig) -> str:
    """`idn train ...` with every option that differs from the preset."""
    choice = f"idn train {config.dataset} --model {config.model} --size {config.size}"
    return " ".join([choice, *options(differences(config))])


def variant(config: TrainConfig) -> str:
    """The options that make a run other than its preset in more than seed, place or speed.

    >>> from dataclasses import replace
    >>> variant(replace(preset("moons"), seed=3))
    ''
    """
    found = {name: value for name, value in differences(config).items() if not name.startswith(ASIDE)}
    if config.engine.precision != "fp32":
        found["engine.precision"] = config.engine.precision
    return " ".join(options(found))


def differences(config: TrainConfig) -> dict[str, Any]:
    """Settings, by their full names, that are not the preset's."""
    usual = flat(preset(config.dataset, config.model, config.size).to_dict())
    own = flat(config.to_dict())
    skipped = (*PLACES, "flow.seed")  # the flow's seed is the run's
    return {name: value for name, value in own.items() if name not in skipped and usual.get(name) != value}


def options(settings: dict[str, Any]) -> list[str]:
    """Settings in the command line's words.

    >>> options({"optimiser.lr": 0.01, "flow.blocks": (2, 2), "flow.actnorm": True, "data.flip": False})
    ['--lr 0.01', '--flow.blocks 2 2', '--flow.actnorm', '--no-flip']
    """
    words = []
    for name, value in settings.items():
        prefix, _, last = name.rpartition(".")
        place = f"{prefix}." if prefix.startswith("flow") else ""
        place, last = place.replace("_", "-"), last.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{place}{'' if value else 'no-'}{last}")
        else:
            text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"--{place}{last} {text}")
    return words


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
