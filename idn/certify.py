"""`idn certify MODEL`: a proof for every block of a flow that Lip(g) < 1, so that it can be inverted."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tqdm import tqdm

from idn.errors import UserError
from idn.files import write_json
from idn.flows.block import Block
from idn.flows.bounds import BranchProof, prove
from idn.flows.files import load
from idn.flows.flow import Flow
from idn.models import find_model, has_average

Precision = Literal["fp32", "bf16", "fp16"]


def proofs(flow: Flow) -> Iterator[tuple[Block, BranchProof]]:
    """A proof per block, with a progress bar on stderr."""
    with tqdm(flow.blocks, unit="block", leave=False) as bar:
        for block in bar:
            bar.set_postfix_str(block.name)
            yield block, prove(block.branch)


def certify(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="flow file, or a folder that holds one")],
    precision: Annotated[Precision, tyro.conf.arg(help="what weights are rounded to before they multiply")] = "fp32",
    raw: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="the raw weights, not the averaged ones")
    ] = False,
    json: Annotated[Path | None, tyro.conf.arg(help="also write the bounds, layer by layer, to this file")] = None,
) -> int:
    """Prove Lip(g) < 1 for every block x + g(x) of a flow; exit with 1 if a proof is missing.

    The bound is a theorem about the weights that are multiplied, rounding included. The estimate beside it is what the
    power iteration that normalises the weights believes: it lies below the truth as long as it has not converged.
    """
    if json is not None and not json.parent.is_dir():
        raise UserError(f"cannot write {json}: there is no folder {json.parent}")
    path, started = find_model(model), time.monotonic()
    flow = load(path, ema=not raw)
    if precision != "fp32":
        flow.set_precision(precision)
    weights = "raw" if raw or not has_average(path) else "averaged"
    print(f"{path}: {weights} weights, {precision}")
    width = max([len("block"), *(len(block.name) for block in flow.blocks)])
    print(f"{'block':<{width}}  {'estimate':>8}  {'Lip(g) <=':>9}")
    found: list[tuple[Block, BranchProof]] = []
    for block, proof in proofs(flow):
        found.append((block, proof))
        tqdm.write(f"{block.name:<{width}}  {proof.estimate:8.5f}  {rounded_up(proof.bound):>9}{remark(proof)}")
    if json is not None:
        write_json(json, report(path, weights, precision, found))
    refused = [block.name for block, proof in found if not proof.proven]
    seconds = f"({time.monotonic() - started:.0f} s)"
    if refused:
        print(f"NOT PROVEN for {len(refused)} of {len(found)} blocks, which may not be invertible {seconds}")
        return 1
    largest = max((proof.bound for _, proof in found), default=0.0)
    print(f"proven: Lip(g) <= {rounded_up(largest)} < 1 for all {len(found)} blocks {seconds}")
    return 0


def rounded_up(bound: float) -> str:
    """Five decimals that still are an upper bound."""
    return f"{math.ceil(bound * 1e5) / 1e5:.5f}" if math.isfinite(bound) else "none"


def remark(proof: BranchProof) -> str:
    """Where to look when there is no proof."""
    if proof.proven:
        return ""
    number, layer = max(enumerate(proof.layers, start=1), key=lambda item: item[1].bound / item[1].layer.coeff)
    return f"  NOT PROVEN: layer{number} {rounded_up(layer.bound)}, allowed {layer.layer.coeff}"


def report(path: Path, weights: str, precision: Precision, found: list[tuple[Block, BranchProof]]) -> dict[str, Any]:
    """Everything that was proven, ready for JSON; an infinite bound is null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    blocks = [
        {
            "name": block.name,
            "estimate": number(proof.estimate),
            "bound": number(proof.bound),
            "proven": proof.proven,
            "layers": [
                {"estimate": number(layer.estimate), "bound": number(layer.bound), "method": layer.method}
                for layer in proof.layers
            ],
        }
        for block, proof in found
    ]
    return {
        "model": str(path),
        "weights": weights,
        "precision": precision,
        "proven": all(proof.proven for _, proof in found),
        "blocks": blocks,
    }
