"""fp16's loss scale: as large as gradients allow, halved when they overflow."""

from dataclasses import dataclass

PATIENCE = 500
"""Good steps before the scale is tried twice as large."""


@dataclass
class LossScale:
    """Only fp16 needs one; with `on` false it stays at 1 and an overflow is an error."""

    on: bool
    value: float = 1.0
    good_steps: int = 0

    @classmethod
    def start(cls, precision: str) -> "LossScale":
        return cls(True, 2.0**16) if precision == "fp16" else cls(False)

    def good(self) -> None:
        """A finite step."""
        self.good_steps += 1
        if self.on and self.good_steps % PATIENCE == 0:
            self.value = min(self.value * 2, 2.0**24)

    def overflow(self) -> bool:
        """Try a smaller scale; false when there is none, so that the overflow is real."""
        self.good_steps = 0
        if not self.on or self.value <= 1:
            return False
        self.value /= 2
        return True
