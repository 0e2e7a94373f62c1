"""Which samples were trained on, step by step: a record for audits, kept where $IDN_LEDGER names a shared folder."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TextIO

from idn.train.feed import Share

VARIABLE = "IDN_LEDGER"


class Ledger:
    """One file per rank and start of the workers, one line per update: when, which step, each sample's digest."""

    def __init__(self, attempt: str, rank: int) -> None:
        self._file: TextIO | None = None
        if folder := os.environ.get(VARIABLE):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = (Path(folder) / f"{attempt}-{rank:05d}.jsonl").open("a")

    def note(self, step: int, share: Share) -> None:
        """Called after the update: a line means that the samples are in the weights."""
        if self._file is None:
            return
        # A stand-in of weight 0 teaches nothing.
        data = share.data if share.weight else share.data[:0]
        samples = [hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16] for sample in data]
        self._file.write(json.dumps({"time": time.time(), "step": step + 1, "samples": samples}) + "\n")
        self._file.flush()
