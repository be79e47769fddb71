"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Sample, Source, make_loader
from dflop_jax.data.content import counter_of
from dflop_jax.data.datasets.mixture import shares
from dflop_jax.records import Load, Plan, Schedule
from dflop_jax.report.run_folder import read_evaluations
from dflop_jax.report.wall_time import EVALUATION
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.train.callbacks import Evaluation, HeldOutLoss
from dflop_jax.train.choose_plan import ReadyRun
from dflop_jax.train.feed import BatchLoss, Packer, ReadyBatch, shared_schedule
from dflop_jax.train.step_figures import added

logger = logging.getLogger("dflop_jax.train")
PACKED_BYTES = 1 << 30


@dataclass(frozen=True)
class _Batch:
    """Held-out samples of one dataset, scheduled; `places` are those of what this process
    needs."""

    dataset: str
    indices: list[int]
    loads: list[Load]
    schedule: Schedule
    places: list[int]


class HeldOut:
    """Evaluates the held-out samples of a run, all processes together. `row` is the newest
    evaluation; `best` the step and the loss of the saved one of the lowest, (None, inf) for none.

    A batch holds samples of one dataset. Samples that no compiled shape holds are left out, and
    named. Packed batches stay in host memory if PACKED_BYTES of every process hold all of them;
    else they are decoded anew for every evaluation, while the devices run those before.
    """

    def __init__(self, ready: ReadyRun, packer: Packer):
        source, config = ready.held_out, ready.place.config
        assert source is not None
        self._ready, self._packer = ready, packer
        self._loader = make_loader(config, source)
        n = min(config.train.eval_samples or len(source), len(source))
        if n < config.train.eval_samples:
            logger.warning(
                "%s: %d held-out samples, fewer than train.eval_samples=%d",
                source.name,
                n,
                config.train.eval_samples,
            )
        everything = held_out_samples(source, n, config.data.seed)
        counted = counter_of(packer.model)
        self._batches: list[_Batch] = []
        for name, chosen in _held(source, everything, packer.plan).items():
            size = min(len(chosen), config.train.global_batch)
            for first in range(0, len(chosen), size):
                which = chosen[first : first + size]
                loads = [counted(source.load(i)) for i in which]
                solved = None
                if packer.peers.is_primary:
                    solved = schedule_batch(loads, packer.plan, ready.prices, ready.ex.trainable)
                n = len(self._batches)
                schedule = shared_schedule(packer.peers, "held out", n, solved)
                places = packer.own(schedule, loads)
                self._batches.append(_Batch(name, which, loads, schedule, places))
        self.best = self._best_so_far()
        self._packed: list[ReadyBatch] = []  # all, or none
        self._passes = 0
        self.row: Evaluation | None = None

    def _best_so_far(self) -> tuple[int | None, float]:
        """Of the run before this one's first step, where it is to be kept."""
        ready = self._ready
        best: tuple[int | None, float] = None, math.inf
        if ready.folder and ready.place.config.checkpoint.keep_best:
            saved = {*ready.saver.store.steps()}
            for row in read_evaluations(ready.folder.path):
                if row.step in saved and row.loss is not None and row.loss < best[1]:
                    best = row.step, row.loss
        return ready.place.peers.broadcast("best", best, tuple[int | None, float])

    def run(self, step: int) -> Evaluation:
        """Evaluate the parameters after `step` steps, all of them finished, and report it."""
        ready = self._ready
        with ready.place.time.part(EVALUATION):
            self.row = row = self._evaluated(step)
        ready.progress.log(f"after step {step}: {row}")
        for name, loss in row.by_source.items():
            ready.progress.log(f"  {name}: {loss}")
        if ready.folder:
            ready.folder.append_evaluation(row)
        for c in ready.callbacks.called:
            c.after_evaluation(step, row)
        return row

    def _evaluated(self, step: int) -> Evaluation:
        """What the current parameters come to, or their average where the run keeps one."""
        ex, peers = self._ready.ex, self._packer.peers
        sums: dict[str, list[Mapping[str, float]]] = {}  # by dataset
        denominators: dict[str, list[Mapping[str, float]]] = {}
        with closing(self._ready_batches()) as batches, ex.averaged():
            for of, batch in zip(self._batches, batches, strict=True):
                result = ex.run_evaluation(batch.schedule, batch.groups).local_result()
                sums.setdefault(of.dataset, []).append(result.sums)
                denominators.setdefault(of.dataset, []).append(batch.loss.denominators)
        # Who predicts no tokens has none that are correct.
        parts = peers.gather(
            "evaluated",
            {n: added(s) for n, s in sums.items()},
            dict[str, dict[str, float]],
            step=step,
        )
        totals = peers.broadcast(
            "evaluated",
            {n: added([p[n] for p in parts]) for n in sums},
            dict[str, dict[str, float]],
            step=step,
        )
        weights, model = {n: added(d) for n, d in denominators.items()}, ex.model
        whole = _held_out_loss(model, added(totals.values()), added(weights.values()))
        by_source = {n: _held_out_loss(model, s, weights[n]) for n, s in totals.items() if n}
        return Evaluation(step, whole.loss, whole.accuracy, by_source)

    def _ready_batches(self) -> Generator[ReadyBatch, None, None]:
        if self._packed:
            yield from self._packed
            return
        self._passes += 1
        key, peers = f"evaluation/{self._passes}/", self._packer.peers

        def pack(k: int, samples: dict[int, Sample]) -> ReadyBatch:
            b = self._batches[k]
            return self._packer.pack(b.schedule, b.loads, samples, key=key, step=k)

        fresh = self._loader.batches(
            range(len(self._batches)),
            pack,
            lambda k: self._batches[k].places,
            lambda k: self._batches[k].indices,
        )
        packed, n_bytes = list[ReadyBatch](), 0
        try:
            for batch in fresh:
                n_bytes += batch.n_bytes
                packed = [*packed, batch] if n_bytes <= PACKED_BYTES else []
                yield batch
        finally:
            peers.cancel_waits(key)  # the others may have stopped before they sent all
            fresh.close()
        if not any(peers.all_gather("evaluation fits", n_bytes > PACKED_BYTES, bool)):
            self._packed = packed


def _held(source: Source, chosen: Mapping[str, list[int]], plan: Plan) -> dict[str, list[int]]:
    """Those of the samples that some bucket of the plan holds, by dataset."""
    every = [i for which in chosen.values() for i in which]
    large = {every[k] for k in oversize_samples([source.load(i) for i in every], plan)}
    if large:
        names = ", ".join(source.label(i) for i in sorted(large)[:3])
        logger.warning(
            "%s: %d of %d held-out samples are larger than any compiled shape holds (%s%s)",
            source.name, len(large), len(every), names, ", ..." if len(large) > 3 else "",
        )  # fmt: skip
    if every and len(large) == len(every):
        raise ValueError(f"{source.name}: no held-out sample fits a compiled shape; plan for it")
    held = {name: [i for i in which if i not in large] for name, which in chosen.items()}
    return {name: which for name, which in held.items() if which}


def held_out_samples(source: Source, n: int, seed: int) -> dict[str, list[int]]:
    """Return which `n` samples of what is held out are evaluated, drawn by the seed over all of it:
    by dataset of a mixture in the shares that they have of it, at least one of each where `n`
    suffices; else by ""."""
    part_of = getattr(source, "part_of", None)
    members: dict[str, list[int]] = {}
    for i in range(len(source)):
        members.setdefault(part_of(i) if part_of else "", []).append(i)
    if len(members) == 1:
        members = {"": list(range(len(source)))}
    counts = shares([len(m) for m in members.values()], n)
    rng = np.random.default_rng([seed, 3])  # another stream than what draws the records
    drawn = {
        name: sorted(rng.permutation(which)[:count].tolist())
        for (name, which), count in zip(members.items(), counts, strict=True)
    }
    return {name: which for name, which in drawn.items() if which}


def _held_out_loss(
    model: MultimodalModel, sums: Mapping[str, float], denominators: Mapping[str, float]
) -> HeldOutLoss:
    losses = BatchLoss.of(model, denominators)
    if not losses.is_supervised:
        return HeldOutLoss(math.nan, None)
    accuracy = None
    if f"{list(denominators)[-1]}.correct" in sums:
        accuracy = list(losses.means(sums, "correct").values())[-1]
    return HeldOutLoss(losses.total(sums), accuracy)
