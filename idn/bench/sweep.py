"""How cost grows with blocks, batch and image area: a straight line each, with recomputation in memory too."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from idn.bench.work import Job, Worker
from idn.files import write_bytes

ONE_SCALE = {"blocks": (2,), "fc_blocks": 0}
AXES: dict[str, list[tuple[float, dict[str, Any], int]]] = {
    "blocks": [(n, {"blocks": (n,)}, 16) for n in (1, 2, 4, 8)],
    "batch": [(n, {}, n) for n in (8, 16, 32, 64)],
    "pixels": [(side * side, {"shape": (3, side, side)}, 16) for side in (8, 16, 24, 32)],
}
"""For each axis: its value, what it changes in the flow, and the batch."""


def sweep(threads: int, rounds: int = 5) -> list[dict[str, Any]]:
    """Fastest seconds and peak bytes of a training step along each axis, with and without recomputation."""
    found = []
    for axis, places in AXES.items():
        for value, change, batch in places:
            for recompute in (False, True):
                job = Job(True, "train", "cifar10", "idensenet-lc", batch=batch, recompute=recompute, threads=threads)
                worker = Worker(replace(job, overrides=ONE_SCALE | change))
                measured = [worker.repeat(seed % 2) for seed in range(rounds)]
                worker.close()
                seconds, peak = min(each.seconds for each in measured), max(each.peak for each in measured)
                found.append({"axis": axis, "value": value, "recompute": recompute, "seconds": seconds, "peak": peak})
    return found


def draw_sweep(found: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over each axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(2, len(AXES), figsize=(4 * len(AXES), 6), constrained_layout=True)
    for column, axis in enumerate(AXES):
        for recompute in (False, True):
            points = [each for each in found if each["axis"] == axis and each["recompute"] == recompute]
            values, label = [p["value"] for p in points], "recomputing" if recompute else "keeping"
            places[0, column].plot(values, [1000 * p["seconds"] for p in points], "o-", label=label)
            places[1, column].plot(values, [p["peak"] / 1e6 for p in points], "o-", label=label)
        for row, unit in enumerate(("ms per step", "MB at most")):
            places[row, column].set(xlabel=axis, ylabel=unit, xlim=(0, None), ylim=(0, None))
        places[0, column].legend()
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lstrip(".") or "png")
    write_bytes(path, picture.getvalue())
    plt.close(figure)
