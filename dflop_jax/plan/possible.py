"""Whether a policy has a placement at all, which no measurement changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflop_jax.config import PlanConfig
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import rank_sizes, rank_submeshes, why_none
from dflop_jax.plan.explain import NO_SUBMESHES
from dflop_jax.plan.placement import ModelFacts
from dflop_jax.plan.space import baseline, families
from dflop_jax.records import SubmeshPlan


def check_possible(
    facts: ModelFacts,
    n_devices: int,
    node: int,
    config: PlanConfig,
    allowed: Callable[[SubmeshPlan], bool],
) -> None:
    """ValueError, as `search_plan` would raise it, unless the policy has a placement on so many
    devices, `node` of them in a node, whose submeshes are `allowed`."""
    every = _submeshes(facts, n_devices, node, config)
    if not any(all(map(allowed, submeshes)) for submeshes in every):
        raise ValueError(NO_SUBMESHES)


def _submeshes(
    facts: ModelFacts, n_devices: int, node: int, config: PlanConfig
) -> Iterator[tuple[SubmeshPlan, ...]]:
    """Those of each placement."""
    for space in families(facts, n_devices, node, config).values():
        for family in space:
            for i in range(len(family)):
                yield family.layout(i, facts.n_layers).submeshes
    yield from (layout.submeshes for layout in baseline(facts, n_devices, node, config))
    if config.policy in (DIP, "auto"):
        ranks = list(rank_sizes(facts, n_devices, node, config))
        if not ranks and config.policy == DIP:
            raise ValueError(why_none(n_devices, config, facts.n_layers))
        yield from (rank_submeshes(*sizes) for sizes in ranks)
