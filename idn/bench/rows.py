"""The rows of the speed table: what is compared, and what is wished for."""

from dataclasses import dataclass, replace

from idn.bench.work import Job
from idn.flows.logdet import LogdetRule

ROULETTE = LogdetRule(lengths="geometric", parameter=0.5)
"""The published code's rule on toy data, where ours is exact."""
TOY_POWER_ITERATIONS = 5
"""The published code's on toy data; on images it stops at a tolerance that one iteration meets."""


@dataclass(frozen=True)
class Row:
    """Ours beside something else, repeated in turn."""

    name: str
    title: str
    ours: Job
    other: Job
    goal: float
    """Of the other's time (or memory) over ours; for shares, of ours over the other's."""
    rounds: int = 5
    measure: str = "time"
    """time, memory, share (of the other's time), slowdown or limit (bytes)."""


def train(dataset: str, model: str, precision: str = "fp32", batch: int = 16) -> tuple[Job, Job]:
    """A training step of ours, and the plain one, which is always in fp32."""
    ours = Job(True, "train", dataset, model, precision=precision, batch=batch)
    return ours, replace(ours, ours=False, precision="fp32", recompute=False)


DENSE, DENSE_PLAIN = train("cifar10", "idensenet-lc")
TOY, TOY_ROULETTE = (replace(job, steps=10) for job in train("moons", "idensenet-lc", batch=500))
TOY_PLAIN = replace(TOY_ROULETTE, rule=ROULETTE, power_iterations=TOY_POWER_ITERATIONS)
EVALUATE = Job(True, "evaluate", "cifar10", "idensenet-lc")
SAMPLE = Job(True, "sample", "cifar10", "idensenet-lc")

ROWS = (
    Row("dense", "CIFAR10 i-DenseNet+LC, training step, fp32", DENSE, DENSE_PLAIN, 1.4),
    Row("dense-bf16", "... bf16, against fp32", *train("cifar10", "idensenet-lc", "bf16"), 3.0, rounds=2),
    Row("residual", "CIFAR10 Residual Flow, training step, fp32", *train("cifar10", "residual"), 2.0),
    Row("residual-bf16", "... bf16, against fp32", *train("cifar10", "residual", "bf16"), 5.0, rounds=2),
    Row("mnist", "MNIST i-DenseNet+LC, training step, fp32", *train("mnist", "idensenet-lc"), 1.4),
    Row("mnist-bf16", "... bf16, against fp32", *train("mnist", "idensenet-lc", "bf16"), 3.0, rounds=2),
    Row("toy", "toy i-DenseNet+LC, iteration, fp32", TOY, TOY_PLAIN, 8.0, rounds=10),
    Row("toy-bf16", "... bf16, against fp32", replace(TOY, precision="bf16"), TOY_PLAIN, 8.0, rounds=10),
    Row("memory", "CIFAR10 i-DenseNet+LC, peak memory", DENSE, DENSE_PLAIN, 2.0, rounds=2, measure="memory"),
    Row(
        "memory-recompute",
        "... recomputing, peak memory",
        replace(DENSE, recompute=True),
        DENSE_PLAIN,
        5.0,
        rounds=2,
        measure="memory",
    ),
    Row(
        "recompute", "... recomputing, time over ours", replace(DENSE, recompute=True), DENSE, 1.15, measure="slowdown"
    ),
    Row(
        "full",
        "CIFAR10 i-DenseNet+LC full, recomputing, peak memory",
        replace(DENSE, size="full", recompute=True),
        replace(DENSE, size="full", recompute=True),
        3e9,
        rounds=1,
        measure="limit",
    ),
    Row(
        "norms",
        "power iteration, share of a step",
        replace(DENSE, work="norms", steps=4),
        DENSE,
        0.05,
        measure="share",
    ),
    Row("evaluate", "CIFAR10 i-DenseNet+LC, 20 exact terms", EVALUATE, replace(EVALUATE, ours=False), 3.0, rounds=3),
    Row("sample", "CIFAR10 i-DenseNet+LC, sampling", SAMPLE, replace(SAMPLE, ours=False), 4.0, rounds=3),
)
