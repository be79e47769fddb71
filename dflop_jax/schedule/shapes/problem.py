"""For what shapes are chosen: the plan that will run with them, at the prices that it runs at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dflop_jax.records import Bucket, Layout, Plan, Prices
from dflop_jax.schedule.batch import Capacity, capacity_of
from dflop_jax.schedule.costs import GroupCosts, group_costs

Buckets = tuple[Bucket, ...]


def _as_it_is(layout: Layout) -> Plan:
    return Plan("", layout)


@dataclass(frozen=True, eq=False)
class ShapeProblem:
    """What buckets are chosen for.

    Attributes:
      layout: where the modules lie; its own buckets do not matter.
      prices: of all that runs in a layout.
      global_batch: samples of a step.
      n_buckets: at most so many are chosen.
      trainable: names of the segments that train; None: all.
      piece_tokens: modules whose rows take one piece each, and its tokens.
      token_multiple: tokens of packed rows are a multiple of it (128 on GPU).
      max_tokens: by module, most tokens of a microbatch on one rank that memory allows.
      max_microbatches: most microbatches that an average batch is cut into.
      as_run: the plan that a policy makes of the layout with chosen buckets.
    """

    layout: Layout
    prices: Callable[[Layout], Prices]
    global_batch: int
    n_buckets: int = 4
    trainable: Collection[str] | None = None
    piece_tokens: Mapping[str, int] = field(default_factory=dict)
    token_multiple: int = 128
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    max_microbatches: int = 16
    as_run: Callable[[Layout], Plan] = _as_it_is

    @cached_property
    def capacity(self) -> Capacity:
        return capacity_of(self.layout)

    @property
    def ranks(self) -> Mapping[str, int]:
        """Data ranks by module, in topological order."""
        return self.capacity.ranks

    @cached_property
    def training(self) -> Collection[str]:
        """Names of the segments that train."""
        every = [s.name for s in self.layout.segments]
        return every if self.trainable is None else self.trainable

    def with_buckets(self, buckets: Buckets) -> Plan:
        """The plan that runs with these buckets."""
        return self.as_run(replace(self.layout, buckets=buckets))

    def costs(self, bucket: Bucket) -> GroupCosts:
        """What groups of a bucket take on each resource."""
        layout = replace(self.layout, buckets=(bucket,))
        return group_costs(layout, self.prices(layout), self.training)
