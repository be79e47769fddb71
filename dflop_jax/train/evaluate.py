"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Sample, Source, make_loader
from dflop_jax.data.content import content_counter
from dflop_jax.data.datasets.mixture import split_proportionally
from dflop_jax.records import Load, Plan, Schedule
from dflop_jax.report.run_folder import read_evaluations
from dflop_jax.report.wall_time import EVALUATION
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.schedule.buckets.sizes import oversize_samples
from dflop_jax.train.callbacks import Evaluation, HeldOutResult
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.feed import BatchLoss, PackedBatch, Packer
from dflop_jax.train.step_figures import sum_by_name

logger = logging.getLogger("dflop_jax.train")


@dataclass(frozen=True)
class _HeldOutBatch:
    """A scheduled batch of held-out samples of one dataset."""

    dataset: str
    indices: list[int]
    loads: list[Load]
    schedule: Schedule
    positions: list[int]  # positions in the batch of the samples that this process needs


class HeldOutEvaluator:
    """Evaluates the held-out samples of a run, on all processes together. `row` is the newest
    evaluation; `best` is (step, loss) of the saved evaluation with the lowest loss, or (None, inf).

    A batch holds samples of one dataset. Samples that no compiled shape holds are left out, and a
    warning names them. Every evaluation decodes its batches while the devices run earlier ones.
    """

    def __init__(self, run: PlannedRun, packer: Packer):
        source, config = run.held_out, run.context.config
        assert source is not None
        self._run, self._packer = run, packer
        self._loader = make_loader(config, source)
        n_requested = config.train.eval_samples
        n = min(n_requested or len(source), len(source))
        if n < n_requested:
            text = "%s: %d held-out samples, fewer than train.eval_samples=%d"
            logger.warning(text, source.name, n, n_requested)
        drawn = draw_held_out_samples(source, n, config.data.seed)
        count_load = content_counter(packer.model)
        self._batches: list[_HeldOutBatch] = []
        for name, dataset_indices in _samples_that_fit(source, drawn, packer.plan).items():
            size = min(len(dataset_indices), config.train.global_batch)
            for first in range(0, len(dataset_indices), size):
                indices = dataset_indices[first : first + size]
                loads = [count_load(source.load(i)) for i in indices]
                solved = None
                if packer.peers.is_primary:
                    solved = schedule_batch(loads, packer.plan, run.prices, run.ex.trainable)
                step = len(self._batches)
                schedule = packer.peers.broadcast("held out", solved, Schedule, step=step)
                positions = packer.find_needed_samples(schedule, loads)
                self._batches.append(_HeldOutBatch(name, indices, loads, schedule, positions))
        self.best = self._read_best()
        self._n_passes = 0
        self.row: Evaluation | None = None

    def _read_best(self) -> tuple[int | None, float]:
        """Return (step, loss) of the best saved evaluation of a resumed run if it is to be kept."""
        run = self._run
        best: tuple[int | None, float] = None, math.inf
        if run.folder and run.context.config.checkpoint.keep_best:
            saved_steps = {*run.saver.store.steps()}
            for row in read_evaluations(run.folder.path):
                if row.step in saved_steps and row.loss is not None and row.loss < best[1]:
                    best = row.step, row.loss
        return run.context.peers.broadcast("best", best, tuple[int | None, float])

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate the parameters after `step` finished steps, and report the result."""
        run = self._run
        with run.context.time_log.track(EVALUATION):
            self.row = row = self._compute_losses(step)
        run.progress.log(f"after step {step}: {row}")
        for name, loss in row.by_source.items():
            run.progress.log(f"  {name}: {loss}")
        if run.folder:
            run.folder.append_evaluation(row)
        for c in run.callbacks.active:
            c.after_evaluation(step, row)
        return row

    def _compute_losses(self, step: int) -> Evaluation:
        """Evaluate the current parameters, or their moving average if the run has one."""
        ex, peers = self._run.ex, self._packer.peers
        # Lists by dataset.
        sums, denominators = defaultdict[str, list](list), defaultdict[str, list](list)
        with closing(self._packed_batches()) as batches, ex.averaged():
            for held_out_batch, batch in zip(self._batches, batches, strict=True):
                result = ex.run_evaluation(batch.schedule, batch.groups).local_result()
                sums[held_out_batch.dataset].append(result.sums)
                denominators[held_out_batch.dataset].append(batch.loss.denominators)
        own_sums = {n: sum_by_name(s) for n, s in sums.items()}
        record_type = dict[str, dict[str, float]]
        process_sums = peers.all_gather("evaluated", own_sums, record_type, step=step)
        totals = {n: sum_by_name(p[n] for p in process_sums) for n in sums}
        weights, model = {n: sum_by_name(d) for n, d in denominators.items()}, ex.model
        total = _make_held_out_loss(
            model, sum_by_name(totals.values()), sum_by_name(weights.values())
        )
        by_source = {n: _make_held_out_loss(model, s, weights[n]) for n, s in totals.items() if n}
        return Evaluation(step, total.loss, total.accuracy, by_source)

    def _packed_batches(self) -> Generator[PackedBatch, None, None]:
        self._n_passes += 1
        key, peers = f"evaluation/{self._n_passes}/", self._packer.peers

        def pack(k: int, samples: dict[int, Sample]) -> PackedBatch:
            b = self._batches[k]
            return self._packer.pack(b.schedule, b.loads, samples, key=key, step=k)

        batches = self._loader.batches(
            range(len(self._batches)),
            pack,
            lambda k: self._batches[k].positions,
            lambda k: self._batches[k].indices,
        )
        try:
            yield from batches
        finally:
            peers.cancel_waits(key)  # the others may have stopped before they sent all
            batches.close()


def _samples_that_fit(
    source: Source, indices_by_dataset: Mapping[str, list[int]], plan: Plan
) -> dict[str, list[int]]:
    """Return the samples that some bucket of the plan holds, by dataset."""
    all_indices = [i for indices in indices_by_dataset.values() for i in indices]
    loads = [source.load(i) for i in all_indices]
    too_large = {all_indices[k] for k in oversize_samples(loads, plan)}
    if too_large:
        text = "%s: %d of %d held-out samples are larger than any compiled shape holds (%s, ...)"
        first = source.label(min(too_large))
        logger.warning(text, source.name, len(too_large), len(all_indices), first)
    if all_indices and len(too_large) == len(all_indices):
        raise ValueError(f"{source.name}: no held-out sample fits a compiled shape; plan for it")
    fitting = {
        name: [i for i in indices if i not in too_large]
        for name, indices in indices_by_dataset.items()
    }
    return {name: indices for name, indices in fitting.items() if indices}


def draw_held_out_samples(source: Source, n: int, seed: int) -> dict[str, list[int]]:
    """Draw `n` of the held-out samples by the seed. A mixture's datasets get shares by their size,
    at least one sample each if `n` suffices; a single dataset has the key ""."""
    dataset_of = getattr(source, "dataset_of", None)
    members: dict[str, list[int]] = {}
    for i in range(len(source)):
        members.setdefault(dataset_of(i) if dataset_of else "", []).append(i)
    if len(members) == 1:
        members = {"": list(range(len(source)))}
    counts = split_proportionally([len(m) for m in members.values()], n)
    rng = np.random.default_rng([seed, 3])  # not the random stream that draws the records
    drawn = {
        name: sorted(rng.permutation(indices)[:count].tolist())
        for (name, indices), count in zip(members.items(), counts, strict=True)
    }
    return {name: indices for name, indices in drawn.items() if indices}


def _make_held_out_loss(
    model: MultimodalModel, sums: Mapping[str, float], denominators: Mapping[str, float]
) -> HeldOutResult:
    losses = BatchLoss.for_model(model, denominators)
    if not losses.is_supervised:
        return HeldOutResult(math.nan, None)
    accuracy = None
    if f"{list(denominators)[-1]}.correct" in sums:
        accuracy = list(losses.means(sums, "correct").values())[-1]
    return HeldOutResult(losses.total(sums), accuracy)
