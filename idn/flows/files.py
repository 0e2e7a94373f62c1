"""Flows as files: safetensors, with the configuration in the metadata. Nothing in them can run."""

import json
import os
import tempfile
from os import PathLike
from pathlib import Path

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from idn.errors import UserError
from idn.flows.config import FlowConfig
from idn.flows.flow import Flow

FORMAT = 1
EMA_PREFIX = "ema/"


def save(flow: Flow, path: str | PathLike[str], ema: dict[str, Tensor] | None = None) -> None:
    """Writes to a temporary name first, so that `path` is either whole or as it was."""
    path = Path(path)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in flow.state_dict().items()}
    if unknown := sorted(set(ema or {}) - set(tensors)):
        raise UserError(f"the averaged weights hold {unknown[0]!r}, which this flow does not have")
    tensors |= {EMA_PREFIX + name: tensor.detach().contiguous().cpu().clone() for name, tensor in (ema or {}).items()}
    metadata = {"idn": json.dumps({"format": FORMAT, "config": flow.config.to_dict()})}
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    try:
        save_file(tensors, temporary, metadata)
        Path(temporary).replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: str | PathLike[str], ema: bool = True) -> Flow:
    """The flow in a file, with its averaged weights if there are any and `ema` is true."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}; expected a flow written by `flow.save` or `idn import`")
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("idn", "null"))
            if not isinstance(header, dict):
                raise UserError(f"{path} is a safetensors file of something else: it holds no idn configuration")
            if header.get("format") != FORMAT:
                raise UserError(f"{path} has format {header.get('format')}; this version of idn reads {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a flow: {error}") from error
    try:
        flow = Flow(FlowConfig.from_dict(header["config"]), converge=False)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} holds a configuration that cannot be read: {error}") from error
    raw = {name: tensor for name, tensor in tensors.items() if not name.startswith(EMA_PREFIX)}
    averaged = {name.removeprefix(EMA_PREFIX): t for name, t in tensors.items() if name.startswith(EMA_PREFIX)}
    _put(flow, raw | averaged if ema else raw, path)
    if ema and averaged and not any(name.endswith(".u") for name in averaged):
        flow.update_norms(iterations=50)  # the file's singular vectors belong to the raw weights
    return flow.eval()


def _put(flow: Flow, tensors: dict[str, Tensor], path: Path) -> None:
    expected = flow.state_dict()
    # Older files lack the gradients from which norms go on; they start at zero. Small matrices kept further vectors.
    tensors = {name: zeros for name, zeros in expected.items() if name.endswith(".climb")} | tensors
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected or not name.endswith(".others")}
    for name in sorted(set(expected) ^ set(tensors)):
        raise UserError(f"{path} {'lacks' if name in expected else 'holds an unknown'} tensor {name!r}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}; its configuration says "
                f"{tuple(expected[name].shape)}"
            )
    flow.to(next(t.dtype for t in tensors.values() if t.is_floating_point()))
    flow.load_state_dict(tensors)
