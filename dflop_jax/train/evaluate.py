"""Loss and accuracy on held-out samples, in the shapes that training compiled."""

from __future__ import annotations

from dataclasses import dataclass

from dflop_jax.config import Config
from dflop_jax.data import Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.schedule.costs import BucketCosts
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.train.feed import Batch, Packer


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracy of the supervised held-out tokens after `step` steps."""

    step: int
    loss: float
    accuracy: float


class Evaluator:
    """Packs the held-out batches once and runs them when asked, on all processes together."""

    def __init__(
        self, config: Config, source: Source, ex: Executor, costs: BucketCosts, packer: Packer
    ):
        self._ex, self._peers = ex, packer.peers
        n = min(config.train.eval_samples, len(source))
        size = min(n, config.train.global_batch)
        self._batches = [
            self._pack(source, range(first, min(first + size, n)), costs, packer)
            for first in range(0, n, size)
        ]

    @staticmethod
    def _pack(source: Source, which: range, costs: BucketCosts, packer: Packer) -> Batch:
        shapes = [source.shape(i) for i in which]
        schedule = schedule_batch(shapes, packer.plan, costs)
        samples = {k: source.sample(which[k]) for k in packer.own(schedule, shapes)}
        return packer.pack(schedule, shapes, samples, key=f"evaluation/{which.start}")

    def run(self, step: int) -> Evaluation:
        """Evaluate the current parameters."""
        sums: dict[str, float] = {}
        for batch in self._batches:
            part = self._ex.run_evaluation(batch.groups).local()
            for k, v in part.sums.items():
                sums[k] = sums.get(k, 0.0) + v
        loss, correct = self._peers.sums(
            f"evaluated/{step}", [sums.get("loss_sum", 0.0), sums.get("correct", 0.0)]
        )
        count = max(sum(b.supervised_tokens for b in self._batches), 1)
        return Evaluation(step, loss / count, correct / count)
