"""Why a plan is what it is: why others lost, why nothing fits, and what would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from dflop_jax.hardware import GIB, HARDWARE
from dflop_jax.plan.best_first import searched
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import ranks_of
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.options import options_of, with_options
from dflop_jax.plan.placement import Extent
from dflop_jax.plan.space import baseline, families
from dflop_jax.records import (
    Plan,
    Profile,
    Shape,
    SubmeshPlan,
    by_feature,
    content_s,
    piece_content,
)
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE

NO_SUBMESHES = "no placement: the devices at hand cannot form its submeshes; use another number"
# Times the devices at hand up to which a message says how many would hold a plan; twice as much is
# one more look at a space, only where nothing fits.
_LARGEST_MULTIPLE = 64


def why_it_lost(candidate: Candidate, best: Candidate) -> str:
    """What keeps a placement behind the best one, in a few words."""
    if candidate == best:
        return ""
    busy_s, step_s, best_s = candidate.busy_s, candidate.makespan_s, best.makespan_s
    behind = f"+{max(0.0, step_s / best_s - 1):.1%}: "
    busiest, idlest = (f(busy_s, key=busy_s.__getitem__) for f in (max, min))
    busiest_s = busy_s[busiest]
    if busiest_s >= best_s:
        return f"{behind}{busiest} alone computes {1e3 * busiest_s:.1f} ms"
    waits = 1 - busiest_s / step_s
    if best.busy_s and busiest_s > max(best.busy_s.values()):
        idle = 1 - busy_s[idlest] / step_s
        return f"{behind}{busiest} computes {1e3 * busiest_s:.1f} ms, {idlest} waits {idle:.0%}"
    return f"{behind}even {busiest}, the busiest, waits {waits:.0%}"


@dataclass(frozen=True)
class KindCost:
    """What the layers of one kind of a module take, rows being full of pieces as in the data.

    Attributes:
      layers: how many there are.
      forward_s, backward_s: of one layer, on one tensor rank of the fewest that were timed, at the
        largest shape there.
      share: of the seconds of all layers of the module.
    """

    module: str
    kind: str
    layers: int
    shape: Shape
    forward_s: float
    backward_s: float
    share: float


def kind_costs(profile: Profile) -> list[KindCost]:
    """What layers take, by module and kind."""
    costs, model, loads = [], profile.model, profile.data.loads
    for module in model.n_layers:
        names, of_module = model.features(module), []
        a_token = piece_content(loads, module).sum(axis=1)
        a_token = a_token / max(sum(load.tokens(module) for load in loads), 1)
        for kind, n in Counter(model.layer_kinds(module)).items():
            timed = [t for t in model.timings if (t.module, t.kind) == (module, kind)]
            t = min(timed, key=lambda t: (t.model, -t.shape.size))
            content = (t.shape.size * a_token).tolist()
            forward_s, backward_s = (
                own_s + float(content_s(by_feature(of_content, names), content))
                for own_s, of_content in (
                    (t.layer_forward_s, t.content_forward_s),
                    (t.layer_backward_s, t.content_backward_s),
                )
            )
            of_module.append(KindCost(module, kind, n, t.shape, forward_s, backward_s, 0.0))
        every_s = sum(c.layers * (c.forward_s + c.backward_s) for c in of_module) or 1.0
        costs += [
            replace(c, share=c.layers * (c.forward_s + c.backward_s) / every_s) for c in of_module
        ]
    return costs


@dataclass(frozen=True)
class Saving:
    """What a module's option buys against the next cheaper one.

    Attributes:
      chosen, cheaper: both options in words; "none" saves nothing.
      saved_bytes: of the device of the module's that needs most.
      paid_s: of a step.
      fits: whether memory would hold the cheaper one too.
    """

    module: str
    chosen: str
    cheaper: str
    saved_bytes: float
    paid_s: float
    fits: bool


def savings(evaluator: Evaluator, plan: Plan) -> list[Saving]:
    """What each module of a plan that saves memory gets and pays for it."""
    bought = []
    for module, option in options_of(plan.layout).items():
        each = {o: with_options(plan, {module: o}) for o in evaluator.rules.options(module)}
        busy_s = {o: evaluator.busy_s(p.layout) for o, p in each.items()}
        cheaper = [o for o in each if busy_s[o] < busy_s[option] * (1 - TIE_TOLERANCE)]
        if option not in each or not cheaper:
            continue
        other = max(cheaper, key=busy_s.__getitem__)
        step_s = [evaluator.evaluate(each[o], 0.0).predicted.makespan_s for o in (option, other)]
        peaks = [evaluator.most_by_submesh(each[o]) for o in (option, other)]
        meshes = {s.submesh for s in plan.layout.segments_of(module)}
        held = [max(peak[name] for name in meshes) for peak in peaks]
        words = option.words or "none", other.words or "none"
        if held[0] < held[1]:
            fits = evaluator.fits(each[other])
            bought.append(Saving(module, *words, held[1] - held[0], step_s[0] - step_s[1], fits))
    return bought


def check_possible(extent: Extent, allowed: Callable[[SubmeshPlan], bool]) -> None:
    """ValueError, as `search_plan` would raise it, unless the policy has a placement whose
    submeshes are `allowed`, which no measurement changes."""
    of_families = (
        family.layout(i, extent.n_layers)
        for of_policy in families(extent).values()
        for family in of_policy
        for i in range(len(family))
    )
    ranks = ranks_of(extent) if extent.config.policy in (DIP, "auto") else []
    placements = chain((x.submeshes for x in chain(of_families, baseline(extent))), ranks)
    if not any(all(map(allowed, submeshes)) for submeshes in placements):
        raise ValueError(NO_SUBMESHES)


def why_nothing_fits(rules: Rules, least_bytes: float, nearest: str) -> str:
    """One line: what comes nearest, by how much it exceeds a device, and what would hold it."""
    memory_bytes, config = rules.spec.memory_bytes, rules.spec.config
    if not memory_bytes or least_bytes <= memory_bytes:
        return NO_SUBMESHES
    over = (least_bytes - memory_bytes) / GIB
    more = _devices_that_fit(rules)
    larger = [h.name for h in HARDWARE.values() if h.plannable_bytes >= least_bytes]
    ways = [f"{more} devices would do"] if more else []
    if larger and rules.profile.computed:
        known = " or ".join(larger)
        ways.append(f"so would {known}" if more else f"{known} would do")
    ways += [
        f"a larger plan.max_model ({config.max_model}), plan.max_stage ({config.max_stage}) or "
        f"plan.max_microbatches ({config.max_microbatches}) or smaller samples need less"
    ]
    return (
        f"no plan fits into {memory_bytes / GIB:.2f} GiB per device: the smallest "
        f"({nearest}) needs {over:.2f} GiB more; {', '.join(ways)}"
    )


def _devices_that_fit(rules: Rules) -> int | None:
    """The least doubling of the devices that holds a plan."""
    times = 2
    while times <= _LARGEST_MULTIPLE:
        more = replace(rules.spec, n_devices=times * rules.spec.n_devices)
        if any(space.fits.any() for space in searched(replace(rules, spec=more))):
            return more.n_devices
        times *= 2
    return None
