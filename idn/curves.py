"""Pictures of how a run went: learning curves, and the norm of every layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from idn.plots import Picture, finish, pyplot_module

Record = dict[str, Any]


class Norm(NamedTuple):
    """A layer's weight: its norm as learned, the one it is multiplied with, and the bound."""

    name: str
    learned: float
    used: float
    bound: float


def learning_curves(records: Sequence[Record], unit: str, title: str, entropy: float | None = None) -> Picture:
    """Left the value, of training and validation; right its two parts."""
    pyplot = pyplot_module()
    training = [record for record in records if record["kind"] == "metrics"]
    validation = [record for record in records if record["kind"] == "validation"]
    steps = np.array([record["step"] for record in training])
    values = np.array([record["value"] for record in training])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(steps, values, linewidth=0.8, alpha=0.45, color="tab:blue", label="training batches")
    left.plot(steps, smoothed(values), color="tab:blue", label="training, smoothed")
    if validation:
        left.errorbar(
            [record["step"] for record in validation],
            [record["value"] for record in validation],
            [record["standard_error"] for record in validation],
            color="tab:orange",
            marker=".",
            capsize=2,
            label="validation",
        )
    lowest = [*values, *(record["value"] for record in validation)]
    if entropy is not None:
        left.axhline(entropy, color="black", linestyle="--", linewidth=1, label="the data's entropy")
        lowest.append(entropy)
    low, high = min(lowest), float(np.quantile(values, 0.97))
    left.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
    left.set_ylabel(unit)
    for name, text in (("log_pz", "log p(z)"), ("logdet", "log-det")):
        parts = np.array([record[name] for record in training])
        right.plot(steps, smoothed(parts), label=text)
    right.set_ylabel("nats per sample, smoothed")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    return finish(figure)


def smoothed(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """A running mean over a small share of the curve.

    >>> smoothed(np.array([1.0, 2.0, 3.0])).tolist()
    [1.0, 2.0, 3.0]
    """
    reach = int(len(values) * share)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - reach, 0)
    last = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def layer_norms(norms: Sequence[Norm], title: str) -> Picture:
    """Every layer's norm, as learned and as multiplied with, under the bound."""
    pyplot = pyplot_module()
    places = np.arange(len(norms))
    figure, axes = pyplot.subplots(figsize=(min(max(6.0, 0.13 * len(norms) + 2), 24.0), 4), layout="constrained")
    axes.plot(places, [norm.learned for norm in norms], "o", markersize=4, mfc="none", label="as learned")
    axes.plot(places, [norm.used for norm in norms], "o", markersize=3, label="as multiplied with")
    axes.step(places, [norm.bound for norm in norms], where="mid", color="tab:red", linewidth=1, label="bound")
    blocks = [norm.name.rpartition(".")[0] for norm in norms]
    starts = [i for i, block in enumerate(blocks) if i == 0 or block != blocks[i - 1]]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color="grey", linewidth=0.4)
    axes.set_xticks(starts, [blocks[i] for i in starts], rotation=60, ha="right", fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("spectral norm")
    axes.legend()
    axes.set_title(title)
    return finish(figure)
