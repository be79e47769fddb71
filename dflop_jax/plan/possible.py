"""Whether a policy has a placement at all, which no measurement changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import rank_sizes, rank_submeshes
from dflop_jax.plan.explain import NO_SUBMESHES
from dflop_jax.plan.placement import Extent
from dflop_jax.plan.space import baseline, families
from dflop_jax.records import SubmeshPlan


def check_possible(
    extent: Extent,
    allowed: Callable[[SubmeshPlan], bool],
) -> None:
    """ValueError, as `search_plan` would raise it, unless the policy has a placement whose
    submeshes are `allowed`."""
    if not any(all(map(allowed, submeshes)) for submeshes in _submeshes(extent)):
        raise ValueError(NO_SUBMESHES)


def _submeshes(extent: Extent) -> Iterator[tuple[SubmeshPlan, ...]]:
    """Those of each placement."""
    for space in families(extent).values():
        for family in space:
            for i in range(len(family)):
                yield family.layout(i, extent.facts.n_layers).submeshes
    yield from (layout.submeshes for layout in baseline(extent))
    if extent.config.policy in (DIP, "auto"):
        yield from (rank_submeshes(*sizes) for sizes in rank_sizes(extent))
