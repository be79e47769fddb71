"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dflop_jax.config import Config
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import Source, make_loader
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.train.feed import Packer, ReadyBatch
from dflop_jax.train.losses import BatchLoss

logger = logging.getLogger("dflop_jax.train")


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of some held-out samples, and mean accuracy of the supervised tokens of the last module
    with a loss; None where that predicts no tokens."""

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


class HeldOut:
    """Packs the held-out batches once and runs them when asked, on all processes together.

    A batch holds samples of one dataset. Samples that no compiled shape holds are left out, and
    named.
    """

    def __init__(
        self, config: Config, source: Source, ex: Executor, prices: Prices, packer: Packer
    ):
        self._ex, self._peers = ex, packer.peers
        n = min(config.train.eval_samples, len(source))
        batches = []
        for name, chosen in _held(source, held_out_samples(source, n), packer.plan).items():
            size = min(len(chosen), config.train.global_batch)
            for first in range(0, len(chosen), size):
                which = chosen[first : first + size]
                loads = [source.load(i) for i in which]
                schedule = schedule_batch(loads, packer.plan, prices, ex.trainable)
                batches.append((name, which, loads, schedule, packer.own(schedule, loads)))
        wanted = [which[k] for _, which, _, _, own in batches for k in own]
        decoded = iter(make_loader(config, source).samples(wanted))
        self._batches: dict[str, list[ReadyBatch]] = {}
        for number, (name, _, loads, schedule, own) in enumerate(batches):
            samples = {k: next(decoded) for k in own}
            key = f"evaluation/{number}"
            packed = packer.pack(schedule, loads, samples, key=key)
            self._batches.setdefault(name, []).append(packed)

    def run(self, step: int) -> Evaluation:
        """Evaluate the current parameters."""
        own: dict[str, dict[str, float]] = {}
        denominators: dict[str, dict[str, float]] = {}
        for name, batches in self._batches.items():
            parts = [self._ex.run_evaluation(b.schedule, b.groups).local().sums for b in batches]
            own[name] = _added(parts)
            denominators[name] = _added([b.loss.denominators for b in batches])
        keys = [
            (name, f"{module}.{what}")
            for name, modules in denominators.items()
            for module in modules
            for what in ("loss_sum", "correct")
        ]
        known = [own[name].get(k, 0.0) for name, k in keys] + [float(k in own[n]) for n, k in keys]
        totals = self._peers.sums(f"evaluated/{step}", known)
        sums: dict[str, dict[str, float]] = {name: {} for name in own}
        for i, (name, key) in enumerate(keys):
            if totals[len(keys) + i]:  # who predicts no tokens has none that are correct
                sums[name][key] = totals[i]
        model = self._ex.model
        whole = _held_out_loss(model, _added(sums.values()), _added(denominators.values()))
        by_source = {
            name: _held_out_loss(model, sums[name], denominators[name]) for name in own if name
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


def held_out_samples(source: Source, n: int) -> dict[str, list[int]]:
    """Return which `n` samples are held out: by dataset of a mixture in the shares that they have
    of it, at least one of each where `n` suffices; else, by "", the first."""
    part_of = getattr(source, "part_of", None)
    names = [part_of(i) for i in range(len(source))] if part_of else []
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    if len(members) < 2:
        return {"": list(range(n))}
    ends = np.cumsum([len(m) for m in members.values()]) * n / len(source)
    counts = dict(zip(members, np.diff(np.round(ends), prepend=0).astype(int).tolist()))
    for name in [k for k, count in counts.items() if not count]:
        most = max(counts, key=lambda k: counts[k])
        if counts[most] > 1:
            counts[most], counts[name] = counts[most] - 1, 1
    return {name: members[name][:count] for name, count in counts.items() if count}


def _held_out_loss(
    model: MultimodalModel, sums: Mapping[str, float], denominators: Mapping[str, float]
) -> HeldOutLoss:
    losses = BatchLoss.of(model, denominators)
    accuracy = None
    if f"{list(denominators)[-1]}.correct" in sums:
        accuracy = list(losses.means(sums, "correct").values())[-1]
    return HeldOutLoss(losses.total(sums), accuracy)


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    parts = list(parts)
    names = dict.fromkeys(n for part in parts for n in part)
    return {n: sum(part.get(n, 0.0) for part in parts) for n in names}
