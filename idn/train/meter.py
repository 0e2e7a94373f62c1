"""Numbers about the run itself: speed, memory, share of the machine's peak."""

import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from idn.evaluate import bits_or_nats
from idn.train.estimate import measured_peak
from idn.train.session import Session

if TYPE_CHECKING:
    from idn.train.worker import StepResult

HEARTBEAT = 0.5
"""Seconds between signs of life for the progress bar."""


class Meter:
    """Turns step results into records for the driver; only rank 0's are kept."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._flops = session.cost.training_flops(session.config.engine.recompute)
        self._peak = measured_peak(session.config.engine.precision, session.group.device)
        self._steps, self._seconds, self._sent = 0, 0.0, 0.0
        self._since = time.perf_counter()

    def facts(self) -> dict[str, Any]:
        """What does not change until workers start anew. All ranks take part."""
        return {
            "parameters": self.session.cost.parameters,
            "workers": self.session.group.workers,
            "places": self.session.group.places(),
            "flops_per_sample": self._flops,
            "peak_flops": self._peak * self.session.group.workers,
        }

    def resume(self) -> None:
        """Start the clock again after a pause for validation, pictures or a checkpoint."""
        self._since = time.perf_counter()

    def after(self, result: "StepResult", send: Callable[[dict[str, Any]], None]) -> None:
        """Count a step; send a line of metrics or a sign of life when one is due."""
        now = time.perf_counter()
        self._steps, self._seconds = self._steps + 1, self._seconds + now - self._since
        self._since = now
        session, step = self.session, self.session.progress.step
        rate = self._steps * session.config.data.batch / max(self._seconds, 1e-9)
        value = float(bits_or_nats(session.flow, torch.tensor(result.log_pz + result.logdet, dtype=torch.float64)))
        if step % session.config.watching.log_every == 0 or step == session.steps:
            send(self._metrics(result, step, value, rate))
            self._steps, self._seconds = 0, 0.0
        elif now - self._sent < HEARTBEAT:
            return
        else:
            send({"kind": "alive", "step": step, "value": value, "rate": rate})
        self._sent = now

    def _metrics(self, result: "StepResult", step: int, value: float, rate: float) -> dict[str, Any]:
        session = self.session
        sigmas = {name: float(layer.sigma) for name, layer in session.flow.spectral_layers()}
        return {
            "kind": "metrics",
            "step": step,
            "value": value,
            "log_pz": result.log_pz,
            "logdet": result.logdet,
            "gradient_norm": result.gradient_norm,
            "skipped": result.skipped,
            "loss_scale": session.scale.value,
            "rate": rate,
            "share_of_peak": rate * self._flops / (self._peak * session.group.workers),
            "memory_gb": peak_memory(session.group.device) / 1e9,
            "sigma_max": max(sigmas.values()),
            "sigmas": sigmas,
        }


def line_of(record: dict[str, Any]) -> dict[str, Any]:
    """What metrics.jsonl has of a record."""
    return {name: value for name, value in record.items() if name not in ("sigmas", "lines")}


def peak_memory(device: torch.device) -> int:
    """Most bytes that this worker has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
