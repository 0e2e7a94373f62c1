"""What the published training scripts save: weights, their moving average, and the options of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from idn.errors import UserError
from idn.reference.pickles import Inert, StoredTensor, Value
from idn.reference.torchfile import TorchFile, open_torch_file


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, by the authors' names.

    `ema` is empty where they kept none (2-D data). `logit_alpha` is known where the file drags the model along.
    """

    args: dict[str, Value]
    state: dict[str, Tensor]
    ema: dict[str, Tensor]
    logit_alpha: float | None = None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read FILE.pth of either repository. Nothing in it is run; tensors come to the CPU as they are."""
    with open_torch_file(path) as file:
        content = file.content
        if not isinstance(content, dict) or "state_dict" not in content:
            held = f"a dict of {_listed(content)}" if isinstance(content, dict) else _described(content)
            raise UserError(f"{path}: holds {held}, expected a dict with 'state_dict', 'args' and 'ema'")
        state = _tensors(file, content["state_dict"], f"{path}: state_dict")
        shadow = _attributes(content.get("ema")).get("shadow_params", {})
        ema = _tensors(file, shadow, f"{path}: ema") if shadow else {}
        args = {str(name): value for name, value in _attributes(content.get("args")).items()}
        return Checkpoint(args, state, ema, _logit_alpha(content.get("ema")))


def _tensors(file: TorchFile, mapping: Value, where: str) -> dict[str, Tensor]:
    """The tensors of a mapping, without the `module.` that torch.nn.DataParallel puts before names."""
    if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
        raise UserError(f"{where}: holds {_described(mapping)}, expected tensors by name")
    tensors = {}
    for name, stored in mapping.items():
        if not isinstance(stored, StoredTensor):
            raise UserError(f"{where}: {name!r} is {_described(stored)}, expected a tensor")
        tensors[name.removeprefix("module.")] = file.tensor(stored)
    return tensors


def _attributes(value: Value) -> dict[Value, Value]:
    """The attributes of an object that was not made, or the entries of a plain dict."""
    if isinstance(value, Inert):
        # With __slots__ the state is a pair: attributes in a dict, attributes in slots.
        value = value.state[0] if isinstance(value.state, tuple) and value.state else value.state
    return value if isinstance(value, dict) else {}


def _logit_alpha(ema: Value) -> float | None:
    """The margin of the logit, which the scripts choose by dataset and do not list among their options."""
    module = _attributes(ema).get("module")
    first_step = ("transforms", "0", "chain", "0")
    for name in first_step:
        submodules = _attributes(module).get("_modules")
        module = submodules.get(name) if isinstance(submodules, dict) else None
    alpha = _attributes(module).get("alpha")
    return alpha if isinstance(alpha, float) else None


def _described(value: Value) -> str:
    if isinstance(value, Inert):
        return f"an object {value.name}"
    return f"a value of type {type(value).__name__}"


def _listed(names: Mapping[Value, Value]) -> str:
    shown = [repr(name)[:40] for name in list(names)[:4]]
    return ", ".join(shown + ["..."] * (len(names) > 4)) or "nothing"
