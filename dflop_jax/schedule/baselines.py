"""Compare a run with ways to train on the same batches without data-aware scheduling: arrival order
with padding, longest-first assignment under the run's own plan, and uniform data parallelism (FSDP,
also in arrival order). All are simulated, at the prices that schedule the run's batch.

The baselines' programs are never timed. Their prices are the profile's times a ratio: what the
run's programs of the same module take, over what the profile says that they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflop_jax.records import (
    LONGEST_FIRST,
    Group,
    Layout,
    Load,
    Plan,
    PriceList,
    Prices,
    ProgramId,
    Shape,
    content_seconds,
)
from dflop_jax.schedule.batch_scheduler import quick_schedule
from dflop_jax.schedule.costs import segment_directions


@dataclass(frozen=True)
class Baseline:
    """A plan that samples would run under in arrival order."""

    plan: Plan
    prices: PriceList  # by the profile
    trainable: tuple[str, ...]  # segments


@dataclass(frozen=True)
class Baselines:
    """The baselines of a run, by name; one that does not fit into memory is absent."""

    by_name: dict[str, Baseline]
    own_prices: PriceList  # of the run's own programs by the profile


def simulate_baselines(
    loads: Sequence[Load],
    plan: Plan,
    prices: Prices,
    trainable: Collection[str],
    baselines: Baselines,
) -> dict[str, float]:
    """Return by name the step seconds of a global batch under longest-first assignment and under
    each baseline whose buckets hold its samples; `plan`, `prices` and `trainable` are the run's.
    Longest first is the schedule without work for the solver: fullest sample first, into the first
    group with room."""
    longest_first = quick_schedule(loads, plan, prices, trainable, 0)
    seconds = {LONGEST_FIRST: longest_first.makespan_s}
    groups, by_profile = longest_first.groups, baselines.own_prices.prices
    ratios = price_ratios(plan.layout, groups, prices, by_profile, trainable)
    end_ratio = _ratio(prices.step_end, by_profile.step_end)
    send_ratio = _ratio(prices.sends, by_profile.sends)
    for name, one in baselines.by_name.items():
        scaled = scale_prices(one.prices.prices, one.plan.layout, ratios, end_ratio, send_ratio)
        with suppress(ValueError):  # a sample fits none of its buckets
            arrived = quick_schedule(loads, one.plan, scaled, one.trainable, 0)
            seconds[name] = arrived.makespan_s
    return seconds


def price_ratios(
    layout: Layout,
    groups: Sequence[Group],
    prices: Prices,
    by_profile: Prices,
    trainable: Collection[str],
) -> dict[str, float]:
    """Return by module the seconds of these groups' tasks over those by the profile; that of all
    modules for a module without a group."""
    contents: dict[tuple[str, Shape], list[tuple[int, ...]]] = defaultdict(list)
    for g in groups:
        contents[g.module, g.shape].append(g.content)
    directions = segment_directions(layout, trainable)
    totals_M2 = {m: np.zeros(2) for m in layout.modules}
    for (module, shape), content_GF in contents.items():
        content = np.sum(content_GF, axis=0).tolist()
        for s in layout.segments_of(module):
            for program in (ProgramId(s.name, shape, d) for d in directions[s.name]):
                pair = prices.programs.get(program), by_profile.programs.get(program)
                if pair[0] and pair[1]:
                    totals_M2[module] += [
                        len(content_GF) * p.static_s + content_seconds(p.content_s, content)
                        for p in pair
                        if p
                    ]
    all_modules = np.sum([*totals_M2.values()], axis=0)
    return {m: _divide(*(t if t.all() else all_modules)) for m, t in totals_M2.items()}


def scale_prices(
    prices: Prices,
    layout: Layout,
    ratios: Mapping[str, float],
    end_ratio: float = 1.0,
    send_ratio: float = 1.0,
) -> Prices:
    """Return a layout's prices times these ratios: of programs by module, step ends and sends."""
    ratio = {s.name: ratios[s.module] for s in layout.segments}
    return replace(
        prices,
        programs={p: price.scaled(ratio[p.segment]) for p, price in prices.programs.items()},
        step_end={task: end_ratio * s for task, s in prices.step_end.items()},
        sends={send: send_ratio * s for send, s in prices.sends.items()},
    )


def _ratio(seconds: Mapping[Any, float], by_profile: Mapping[Any, float]) -> float:
    """Return the sum over common keys of `seconds` over that by the profile."""
    common = seconds.keys() & by_profile.keys()
    return _divide(sum(seconds[k] for k in common), sum(by_profile[k] for k in common))


def _divide(seconds: float, by_profile: float) -> float:
    """Return the ratio; 1 if one of both is 0, so that the profile's seconds stay."""
    return float(seconds / by_profile) if seconds > 0 < by_profile else 1.0
