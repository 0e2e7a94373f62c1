"""The worker's loop: step, log, validate, save."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from idn.train.checkpoint import Progress, Snapshot, checkpoint_name
from idn.train.config import Optimiser
from idn.train.group import replicated
from idn.train.meter import Meter, line_of
from idn.train.session import Session
from idn.train.showing import Show

Record = dict[str, Any]

LINES = 40
"""Lines of metrics that a checkpoint keeps."""


class Port(Protocol):
    """What the loop asks of the world around it."""

    def send(self, record: Record) -> None:
        """Hand a record to the driver, without waiting."""

    def stop_wanted(self) -> int:
        """0: go on; 1: the driver was told to stop; 2: this worker is about to be taken away."""

    def save(self, snapshot: Snapshot, name: str, metrics: Record) -> None:
        """Write a checkpoint in the background; waits for the one before."""

    def flush(self) -> None:
        """Wait until the last checkpoint is safe."""


class NotFinite(Exception):
    """A loss or gradient that is not finite; nothing was updated."""


class Preempted(Exception):
    """This machine is being taken away; the run goes on elsewhere from the checkpoint just made."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step, averaged over ranks."""

    log_pz: float
    logdet: float
    gradient_norm: float
    skipped: bool
    stop: int


def train(session: Session, port: Port) -> Record:
    """Runs to the end, or to the step where it was asked to stop."""
    progress, config = session.progress, session.config
    send = remembering(progress, port.send)
    meter, show = Meter(session), Show(session, send)
    port.send(
        {"kind": "start", "step": progress.step, "steps": session.steps, "lines": progress.lines, **meter.facts()}
    )
    stop = 0
    while progress.step < session.steps and not stop:
        result = train_step(session, port.stop_wanted)
        progress.step, stop = progress.step + 1, result.stop
        meter.after(result, send)
        last = progress.step == session.steps or bool(stop)
        better = show.validate() if due(config.watching.validate_every, progress.step, last and not stop) else False
        if due(config.watching.picture_every, progress.step, last and not stop):
            show.pictures()
        if due(config.saving.checkpoint_every, progress.step, last) or better:
            save(session, port, better)
        meter.resume()
    if stop == 2:
        port.flush()
        raise Preempted(f"stopped at step {progress.step} after a checkpoint")
    finished = progress.step == session.steps
    return {"finished": finished, "step": progress.step, **(show.final() if finished else {})}


def remembering(progress: Progress, send: Callable[[Record], None]) -> Callable[[Record], None]:
    """Sends records, and keeps the newest lines for the next checkpoint."""

    def remember(record: Record) -> None:
        if record["kind"] in ("metrics", "validation"):
            progress.lines = [*progress.lines[1 - LINES :], line_of(record)]
        send(record)

    return remember


def due(every: int, step: int, last: bool) -> bool:
    """Whether something that happens every few steps, and at the end, happens now."""
    return every > 0 and (step % every == 0 or last)


def train_step(session: Session, stop_wanted: Callable[[], int]) -> StepResult:
    """Forward and backward of every piece, agreement of all ranks that all is finite, then the update."""
    step, engine, feed = session.progress.step, session.engine, session.feed
    share = feed.next_share()
    log_pz = logdet = 0.0
    pieces = feed.pieces(share, step)
    for x, draws, weight in pieces:
        likelihood = engine.accumulate(x.to(session.group.device), draws, weight * loss_factor(session))
        log_pz += weight / len(pieces) * float(likelihood.log_pz.detach().mean())
        logdet += weight / len(pieces) * float(likelihood.logdet.detach().mean())
    bad, is_gradient = session.watch.first_bad()
    rows = session.group.gather([bad, is_gradient, stop_wanted(), log_pz, logdet])
    log_pz, logdet = (math.fsum(row[i] for row in rows) / len(rows) for i in (3, 4))
    stop = int(max(row[2] for row in rows))
    worst = next((rank for rank, row in enumerate(rows) if row[0] >= 0 or not math.isfinite(row[3] + row[4])), None)
    if worst is not None:
        if not session.scale.overflow():
            raise NotFinite(explain(session, step, worst, int(rows[worst][0]), bool(rows[worst][1])))
        engine.discard()
        session.flow.gradient_scale = session.scale.value
        return StepResult(log_pz, logdet, math.inf, True, stop)
    norm = engine.update(*learning_rates(session.config.optimiser, step, session.steps))
    session.progress.updates += 1
    session.scale.good()
    if session.scale.on:
        session.flow.gradient_scale = session.scale.value
    with engine.gathered():
        session.flow.update_norms()
        session.ema.update(session.flow)
    session.ledger.note(step, share)
    return StepResult(log_pz, logdet, norm, False, stop)


def loss_factor(session: Session) -> float:
    """Images are trained on bits per dimension, points of the plane on nats."""
    flow = session.flow
    return 1.0 if flow.config.logit_alpha is None else 1 / (flow.dims * math.log(2))


def learning_rates(optimiser: Optimiser, step: int, steps: int) -> tuple[float, float]:
    """Factors of the learning rate for all weights and for the learnable concatenation, functions of the step alone."""
    factor = min(1.0, (step + 1) / optimiser.warmup) if optimiser.warmup else 1.0
    if optimiser.decay == "cosine":
        factor *= 0.5 * (1 + math.cos(math.pi * step / steps))
    return factor, 0.0 if step < optimiser.freeze_lc else factor


def explain(session: Session, step: int, rank: int, index: int, is_gradient: bool) -> str:
    """Which value, where."""
    what = "gradient" if is_gradient else "loss"
    where = f"in {session.watch.names[index]}" if index >= 0 else "after the last block"
    return f"step {step}, rank {rank}: the {what} is not finite, first {where}; nothing was updated"


def save(session: Session, port: Port, is_best: bool) -> None:
    """Copies the state to memory, checks that ranks agree, and lets the port write it."""
    started = time.perf_counter()
    engine, progress = session.engine, session.progress
    odd = session.group.check_equal(replicated(session.flow, session.ema.shadow, engine.stage < 3))
    if odd:
        raise RuntimeError(f"step {progress.step}: {odd} differs between ranks; no checkpoint was made")
    progress.feed = session.feed.state_dict()
    progress.loss_scale, progress.good_steps = session.scale.value, session.scale.good_steps
    port.flush()
    snapshot = session.snapshots.take(engine, session.ema, replace(progress), is_best)
    port.save(snapshot, checkpoint_name(progress.step, session.attempt), {"step": progress.step})
    port.send({"kind": "saved", "step": progress.step, "stopped_seconds": time.perf_counter() - started})
