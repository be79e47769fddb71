"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflop_jax.config import Config
from dflop_jax.data import Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import Plan
from dflop_jax.report.progress import Progress
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.train.feed import Batch, pack_batch

EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy of the supervised held-out tokens after `step` steps."""

    step: int
    loss: float
    accuracy: float


class Evaluator:
    """Packs the held-out batches once and runs them when asked."""

    def __init__(
        self, config: Config, source: Source, ex: Executor, costs: BucketCosts, folder: Path
    ):
        self._ex, self._path = ex, folder / EVALUATIONS
        n = min(config.train.eval_samples, len(source))
        size = min(n, config.train.global_batch)
        self._batches = [
            self._pack(ex.plan, source, range(first, min(first + size, n)), costs)
            for first in range(0, n, size)
        ]

    @staticmethod
    def _pack(plan: Plan, source: Source, which: range, costs: BucketCosts) -> Batch:
        samples = [source.sample(i) for i in which]
        schedule = schedule_batch([s.shape for s in samples], plan, costs)
        return pack_batch(plan, source.spec, schedule, samples)

    def run(self, step: int, progress: Progress) -> Evaluation:
        """Evaluate the current parameters; adds a row to evaluations.jsonl."""
        sums: dict[str, float] = {}
        for batch in self._batches:
            for k, v in self._ex.run_evaluation(batch.groups).result().sums.items():
                sums[k] = sums.get(k, 0.0) + v
        count = max(sum(b.supervised_tokens for b in self._batches), 1)
        row = Evaluation(step, sums["loss_sum"] / count, sums.get("correct", 0.0) / count)
        progress.log(
            f"after step {step}: held-out loss {row.loss:.4f}, token accuracy {row.accuracy:.3f}"
        )
        with self._path.open("ab") as f:
            f.write(msgspec.json.encode(row) + b"\n")
        return row
