"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Sample, Source, make_loader
from dflop_jax.data.content import counter_of
from dflop_jax.data.datasets.held_out import shares
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Load, Plan, Prices, Schedule
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.train.feed import Packer, ReadyBatch
from dflop_jax.train.losses import BatchLoss

logger = logging.getLogger("dflop_jax.train")
PACKED_BYTES = 1 << 30  # of held-out batches that stay in host memory between evaluations


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of some held-out samples, nan where no token of theirs is supervised, and mean accuracy
    of the supervised tokens of the last module with a loss; None where that predicts no tokens."""

    loss: float
    accuracy: float | None

    def __str__(self) -> str:
        correct = "" if self.accuracy is None else f", token accuracy {self.accuracy:.3f}"
        return f"held-out loss {self.loss:.4f}{correct}"


@dataclass(frozen=True)
class Evaluation:
    """`HeldOutLoss` of the held-out samples after `step` steps; `by_source` that of each dataset of
    a mixture, by its name."""

    step: int
    loss: float
    accuracy: float | None
    by_source: dict[str, HeldOutLoss] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(HeldOutLoss(self.loss, self.accuracy))


@dataclass(frozen=True)
class _Batch:
    """Held-out samples of one dataset, scheduled; `places` are those of what this process
    needs."""

    dataset: str
    indices: list[int]
    loads: list[Load]
    schedule: Schedule
    places: dict[int, frozenset[str]]


class HeldOut:
    """Packs the held-out batches and runs them when asked, on all processes together.

    A batch holds samples of one dataset. Samples that no compiled shape holds are left out, and
    named. As many packed batches stay as PACKED_BYTES hold on process 0; the others are decoded
    anew for every evaluation, while the devices run those before.
    """

    def __init__(
        self, config: Config, source: Source, ex: Executor, prices: Prices, packer: Packer
    ):
        self._ex, self._peers, self._packer = ex, packer.peers, packer
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
                schedule = schedule_batch(loads, packer.plan, prices, ex.trainable)
                places = packer.own(schedule, loads)
                self._batches.append(_Batch(name, which, loads, schedule, places))
        self._packed: list[ReadyBatch] = []  # the first batches
        self._packed_bytes = 0
        self._room, self._passes = True, 0
        with closing(self._ready()) as ready:
            for _ in ready:
                if not self._room:
                    break

    def _ready(self) -> Generator[tuple[str, ReadyBatch], None, None]:
        """Yield (dataset, packed batch) of all."""
        for batch, packed in zip(self._batches, self._packed):
            yield batch.dataset, packed
        rest = range(len(self._packed), len(self._batches))
        if not rest:
            return
        self._passes += 1
        key = f"evaluation/{self._passes}/"
        fresh = self._loader.batches(
            rest,
            partial(self._pack, key),
            lambda k: self._batches[k].places,
            lambda k: self._batches[k].indices,
        )
        try:
            for k, packed in zip(rest, fresh, strict=True):
                if self._room:
                    self._packed_bytes += packed.n_bytes
                    # As process 0 decides, so that all pack the same batches later.
                    fits = b"x" if self._packed_bytes <= PACKED_BYTES else b""
                    self._room = bool(self._peers.broadcast(f"{key}fits", fits, step=k))
                    if self._room:
                        self._packed.append(packed)
                yield self._batches[k].dataset, packed
        finally:
            self._peers.abandon(key)  # the others may have stopped before they sent all
            fresh.close()

    def _pack(self, key: str, k: int, samples: dict[int, Sample]) -> ReadyBatch:
        batch = self._batches[k]
        return self._packer.pack(batch.schedule, batch.loads, samples, key=key, step=k)

    def run(self, step: int) -> Evaluation:
        """Evaluate the current parameters, or their average where the run keeps one."""
        sums_by_source: dict[str, dict[str, float]] = {}
        denominators: dict[str, dict[str, float]] = {}
        with closing(self._ready()) as ready, self._ex.averaged():
            for name, batch in ready:
                sums = self._ex.run_evaluation(batch.schedule, batch.groups).local().sums
                sums_by_source[name] = _added([sums_by_source.get(name, {}), sums])
                before = denominators.get(name, {})
                denominators[name] = _added([before, batch.loss.denominators])
        keys = [
            (name, f"{module}.{what}")
            for name, modules in denominators.items()
            for module in modules
            for what in ("loss_sum", "correct")
        ]
        known = [sums_by_source[name].get(k, 0.0) for name, k in keys] + [
            float(k in sums_by_source[n]) for n, k in keys
        ]
        totals = self._peers.sums("evaluated", known, step=step)
        whole_sums: dict[str, dict[str, float]] = {name: {} for name in sums_by_source}
        for i, (name, key) in enumerate(keys):
            if totals[len(keys) + i]:  # who predicts no tokens has none that are correct
                whole_sums[name][key] = totals[i]
        model = self._ex.model
        whole = _held_out_loss(model, _added(whole_sums.values()), _added(denominators.values()))
        by_source = {
            name: _held_out_loss(model, sums, denominators[name])
            for name, sums in whole_sums.items()
            if name
        }
        return Evaluation(step, whole.loss, whole.accuracy, by_source)


def _held(source: Source, chosen: Mapping[str, list[int]], plan: Plan) -> dict[str, list[int]]:
    """Those of the samples that some bucket of the plan holds, by dataset."""
    every = [i for which in chosen.values() for i in which]
    large = {every[k] for k in beyond([source.load(i) for i in every], plan)}
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
    names = [part_of(i) for i in range(len(source))] if part_of else []
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    if len(members) < 2:
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


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    parts = list(parts)
    names = dict.fromkeys(n for part in parts for n in part)
    return {n: sum(part.get(n, 0.0) for part in parts) for n in names}
