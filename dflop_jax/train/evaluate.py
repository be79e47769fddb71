"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflop_jax.config import Config
from dflop_jax.data import Source, make_loader
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan, Prices
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.train.feed import Packer, ReadyBatch
from dflop_jax.train.losses import BatchLoss

logger = logging.getLogger("dflop_jax.train")


@dataclass(frozen=True)
class Evaluation:
    """Loss of the held-out samples after `step` steps, and mean accuracy of the supervised tokens
    of the last module with a loss."""

    step: int
    loss: float
    accuracy: float


class HeldOut:
    """Packs the held-out batches once and runs them when asked, on all processes together. Samples
    that no compiled shape holds are left out, and named."""

    def __init__(
        self, config: Config, source: Source, ex: Executor, prices: Prices, packer: Packer
    ):
        self._ex, self._peers = ex, packer.peers
        usable = _held(source, min(config.train.eval_samples, len(source)), packer.plan)
        size = config.train.global_batch
        batches = []
        for first in range(0, len(usable), size):
            which = usable[first : first + size]
            loads = [source.load(i) for i in which]
            schedule = schedule_batch(loads, packer.plan, prices, ex.trainable)
            batches.append((which, loads, schedule, packer.own(schedule, loads)))
        wanted = [which[k] for which, _, _, own in batches for k in own]
        decoded = iter(make_loader(config, source).samples(wanted))
        self._batches: list[ReadyBatch] = []
        for which, loads, schedule, own in batches:
            samples = {k: next(decoded) for k in own}
            key = f"evaluation/{which[0]}"
            self._batches.append(packer.pack(schedule, loads, samples, key=key))

    def run(self, step: int) -> Evaluation:
        """Evaluate the current parameters."""
        parts = [self._ex.run_evaluation(b.schedule, b.groups).local().sums for b in self._batches]
        own = _added(parts)
        denominators = _added([b.loss.denominators for b in self._batches])
        whole = BatchLoss.of(self._ex.model, denominators)
        names = [f"{m}.{name}" for m in denominators for name in ("loss_sum", "correct")]
        totals = self._peers.sums(f"evaluated/{step}", [own.get(n, 0.0) for n in names])
        sums = dict(zip(names, totals, strict=True))
        accuracy = list(whole.means(sums, "correct").values())[-1] if denominators else 0.0
        return Evaluation(step, whole.total(sums), accuracy)


def _held(source: Source, n: int, plan: Plan) -> list[int]:
    """Those of the first n samples that some bucket of the plan holds."""
    large = set(beyond([source.load(i) for i in range(n)], plan))
    if large:
        names = ", ".join(source.label(i) for i in sorted(large)[:3])
        logger.warning(
            "%s: %d of %d held-out samples are larger than any compiled shape holds (%s%s)",
            source.name, len(large), n, names, ", ..." if len(large) > 3 else "",
        )  # fmt: skip
    if len(large) == n:
        raise ValueError(f"{source.name}: no held-out sample fits a compiled shape; plan for it")
    return [i for i in range(n) if i not in large]


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name."""
    names = dict.fromkeys(n for part in parts for n in part)
    return {n: sum(part.get(n, 0.0) for part in parts) for n in names}
