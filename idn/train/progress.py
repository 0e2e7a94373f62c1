"""The driver's live progress: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from tqdm import tqdm

LINE_EVERY = 10.0
"""Seconds between plain lines."""


class ProgressBar:
    """Step, bits/dim (nats), samples per second and time left."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._bar: Any = None
        self._steps, self._last_line = 0, 0.0
        self._first, self._began = 0, 0.0
        self._validation = ""

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, record: dict[str, Any]) -> None:
        """Take a worker's record."""
        kind = record["kind"]
        if kind == "start":
            nodes = len({node for node, _ in record["places"]})
            self._start(record["step"], record["steps"], count(record["workers"], "worker") + on_nodes(nodes))
        elif kind in ("metrics", "alive"):
            self._advance(record["step"], record["value"], record["rate"])
        elif kind == "validation":
            self._validation = f", validation {record['value']:.3f}"
            score = f"{record['value']:.4f} +- {record['standard_error']:.4f} {self.unit}"
            self.note(f"step {record['step']:,}: validation {score}")
        elif kind == "pictures" and "problem" in record:
            self.note(f"step {record['step']:,}: no pictures: {record['problem']}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _start(self, step: int, steps: int, workers: str) -> None:
        self.close()
        self._steps, self._first, self._began = steps, step, time.monotonic()
        self.note(f"{workers}, " + (f"resuming at step {step:,} of {steps:,}" if step else f"{steps:,} steps"))
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True, file=sys.stderr)

    def _advance(self, step: int, value: float, rate: float) -> None:
        text = f"{value:.3f} {self.unit}{self._validation}, {rate:,.1f} samples/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY or step == self._steps:
            self._last_line = now
            left = (now - self._began) / max(step - self._first, 1) * (self._steps - step)
            print(f"step {step:,}/{self._steps:,}: {text}, {duration(left)} left", file=sys.stderr, flush=True)


def count(number: int, word: str) -> str:
    """
    >>> count(1, "worker"), count(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number} {word}{'s' * (number != 1)}"


def on_nodes(number: int) -> str:
    """Nothing to say about a single machine."""
    return f" on {number} nodes" if number > 1 else ""


def duration(seconds: float) -> str:
    """
    >>> duration(5), duration(125), duration(7385)
    ('5 s', '2 min', '2 h 3 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
