"""Validation, samples and other things worth looking at, all made with the averaged weights on a copy of the flow."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from idn.data import toy
from idn.errors import UserError
from idn.evaluate import Score, bits_or_nats, evaluate
from idn.flows.draws import Draws
from idn.flows.flow import Flow
from idn.flows.inverse import NotInvertedError
from idn.splits import Scored, Split
from idn.streams import stream
from idn.train.feed import is_toy
from idn.train.session import Session
from idn.views import density_grid, pixels

SETTLE = 10
"""Power iterations before weights are evaluated that training never saw."""
NOISE_PASSES = 8
EVALUATION_BATCH = 64


class Show:
    """Works on its own copy of the flow, so that looking never changes training."""

    def __init__(self, session: Session, send: Callable[[dict[str, Any]], None]) -> None:
        self.session, self.send = session, send
        self._copy = Flow(session.config.flow, converge=False).to(session.group.device)

    def validate(self) -> bool:
        """Scores the validation split on all ranks; whether it is the best so far."""
        score = self._score("validation")
        progress = self.session.progress
        better = progress.best is None or score.value < progress.best
        progress.last_validation = score.value
        if better:
            progress.best = score.value
        variance = self._estimator_variance() if self.session.group.rank == 0 else 0.0
        record = {"kind": "validation", "step": progress.step, "estimator_variance": variance, **asdict(score)}
        self.send(record)
        return better

    def final(self) -> dict[str, Any]:
        """The test split's score."""
        return {"test": asdict(self._score("test")), "best_validation": self.session.progress.best}

    def pictures(self) -> None:
        """Rank 0 draws samples and the like; the driver turns them into pictures."""
        flow = self._averaged()
        if self.session.group.rank:
            return
        config, step = self.session.config, self.session.progress.step
        etas = [eta._asdict() for eta in flow.concatenations()] if config.flow.learnable_concat else []
        record: dict[str, Any] = {"kind": "pictures", "step": step, "etas": etas}
        try:
            record |= self._plane(flow) if is_toy(config) else self._images(flow)
        except (UserError, NotInvertedError) as error:
            # An inverse that did not converge is news, not a reason to lose a run.
            record["problem"] = str(error)
        self.send(record)

    def _averaged(self) -> Flow:
        """The copy with this moment's averages (or weights) and settled norms; all ranks take part."""
        session = self.session
        with session.engine.gathered():
            self._copy.load_state_dict(session.flow.state_dict())
        session.ema.copy_to(self._copy)
        self._copy.eval().update_norms(SETTLE)
        return self._copy

    def _score(self, split: str) -> Score:
        return evaluate(self._averaged(), self._batches(split), self.session.config.seed, self.session.group.sum)

    def _batches(self, split: str) -> Iterator[Scored]:
        data, group = self.session.config.data, self.session.group
        limit = data.limit_validation if split == "validation" else data.limit_test
        part = Split(
            self.session.config.dataset,
            split,
            self.session.config.seed,
            limit,
            data.resize,
            EVALUATION_BATCH,
            data.on_bad_sample,
        )
        for x, places in part.batches(group.rank, group.workers):
            yield Scored(x.to(group.device), places)

    def _estimator_variance(self) -> float:
        """Mean variance of a sample's bits per dimension (nats) from probes and roulette alone, as in training."""
        config = self.session.config
        if config.flow.train_logdet.rule in ("exact", "trace"):
            return 0.0
        x = next(self._batches("validation")).x[:8]
        self._copy.train()
        with torch.no_grad():
            passes = [
                bits_or_nats(self._copy, self._copy(x, Draws.seeded(config.seed, "variance", i)).log_prob)
                for i in range(NOISE_PASSES)
            ]
        self._copy.eval()
        return float(torch.stack(passes).var(0).mean())

    def _images(self, flow: Flow) -> dict[str, Any]:
        config = self.session.config
        generator = stream(config.seed, "pictures", self.session.progress.step)
        originals = next(self._batches("validation")).x[:8]
        z, _ = flow.encode(originals)
        again = flow.decode(z)
        samples = flow.sample(config.watching.samples, generator)
        error = (again - originals).flatten(1).norm(dim=1) / originals.flatten(1).norm(dim=1)
        return {
            "samples": pixels(samples),
            "originals": pixels(originals),
            "reconstructions": pixels(again),
            "reconstruction_error": float(error.max()),
        }

    def _plane(self, flow: Flow) -> dict[str, Any]:
        config = self.session.config
        generator = stream(config.seed, "pictures", self.session.progress.step)
        data = toy.sample(config.dataset, 4000, stream(config.seed, "picture data"))
        return {
            "density": density_grid(flow),
            "points": data.numpy(),
            "samples_2d": flow.sample(2000, generator).cpu().numpy(),
        }
