"""Why a plan is what it is: why others lost, why nothing fits, and what would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from dflop_jax.hardware import GIB, HARDWARE
from dflop_jax.plan.best_first import search_spaces
from dflop_jax.plan.candidate import Candidate
from dflop_jax.plan.dip import POLICY as DIP
from dflop_jax.plan.dip import rank_submeshes
from dflop_jax.plan.evaluate import Evaluator
from dflop_jax.plan.module_tables import SearchContext
from dflop_jax.plan.options import options_of, with_options
from dflop_jax.plan.placement import SpaceLimits
from dflop_jax.plan.space import allowed_baselines, search_families
from dflop_jax.records import (
    Plan,
    Profile,
    Shape,
    SubmeshPlan,
    content_seconds,
    order_coefficients,
    piece_content,
)
from dflop_jax.schedule.buckets.problem import TIE_TOLERANCE

NO_SUBMESHES = "no placement: the devices at hand cannot form its submeshes; use another number"
# Times the devices at hand up to which a message says how many would hold a plan; twice as much is
# one more look at a space, only where nothing fits.
_LARGEST_MULTIPLE = 64


def explain_loss(candidate: Candidate, fastest: Candidate) -> str:
    """What keeps a placement behind the best one, in a few words."""
    if candidate == fastest:
        return ""
    busy_s, step_s, fastest_s = candidate.busy_s, candidate.makespan_s, fastest.makespan_s
    slowdown = f"+{max(0.0, step_s / fastest_s - 1):.1%}: "
    busiest, idlest = (f(busy_s, key=busy_s.__getitem__) for f in (max, min))
    busiest_s = busy_s[busiest]
    if busiest_s >= fastest_s:
        return f"{slowdown}{busiest} alone computes {1e3 * busiest_s:.1f} ms"
    waiting_share = 1 - busiest_s / step_s
    if fastest.busy_s and busiest_s > max(fastest.busy_s.values()):
        idle = f"{idlest} waits {1 - busy_s[idlest] / step_s:.0%}"
        return f"{slowdown}{busiest} computes {1e3 * busiest_s:.1f} ms, {idle}"
    return f"{slowdown}even {busiest}, the busiest, waits {waiting_share:.0%}"


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
        names, module_costs = model.features(module), []
        content_per_token = piece_content(loads, module).sum(axis=1)
        content_per_token = content_per_token / max(sum(load.tokens(module) for load in loads), 1)
        for kind, n in Counter(model.layer_kinds(module)).items():
            timed = [t for t in model.timings if (t.module, t.kind) == (module, kind)]
            t = min(timed, key=lambda t: (t.model, -t.shape.size))
            content = (t.shape.size * content_per_token).tolist()
            forward_s, backward_s = (
                static_s
                + float(content_seconds(order_coefficients(seconds_by_feature, names), content))
                for static_s, seconds_by_feature in (
                    (t.layer_forward_s, t.content_forward_s),
                    (t.layer_backward_s, t.content_backward_s),
                )
            )
            module_costs.append(KindCost(module, kind, n, t.shape, forward_s, backward_s, 0.0))
        module_s = sum(c.layers * (c.forward_s + c.backward_s) for c in module_costs) or 1.0
        costs += [
            replace(c, share=c.layers * (c.forward_s + c.backward_s) / module_s)
            for c in module_costs
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
    module_savings = []
    for module, option in options_of(plan.layout).items():
        plan_by_option = {
            o: with_options(plan, {module: o}) for o in evaluator.context.options(module)
        }
        busy_s = {o: evaluator.busy_s(p.layout) for o, p in plan_by_option.items()}
        cheaper = [o for o in plan_by_option if busy_s[o] < busy_s[option] * (1 - TIE_TOLERANCE)]
        if option not in plan_by_option or not cheaper:
            continue
        cheapest = max(cheaper, key=busy_s.__getitem__)
        step_s = [
            evaluator.evaluate(plan_by_option[o], 0.0).predicted.makespan_s
            for o in (option, cheapest)
        ]
        peaks = [evaluator.peak_bytes_limit(plan_by_option[o]) for o in (option, cheapest)]
        meshes = {s.submesh for s in plan.layout.segments_of(module)}
        module_bytes = [max(peak[name] for name in meshes) for peak in peaks]
        descriptions = option.description or "none", cheapest.description or "none"
        if module_bytes[0] < module_bytes[1]:
            fits = evaluator.fits(plan_by_option[cheapest])
            module_savings.append(
                Saving(
                    module,
                    *descriptions,
                    module_bytes[1] - module_bytes[0],
                    step_s[0] - step_s[1],
                    fits,
                )
            )
    return module_savings


def check_placement_exists(limits: SpaceLimits, allowed: Callable[[SubmeshPlan], bool]) -> None:
    """ValueError, as `search_plan` would raise it, unless the policy has a placement whose
    submeshes are `allowed`, which no measurement changes."""
    family_layouts = (
        family.layout(i, limits.n_layers)
        for policy_families in search_families(limits).values()
        for family in policy_families
        for i in range(len(family))
    )
    ranks = rank_submeshes(limits) if limits.config.policy in (DIP, "auto") else []
    placements = chain(
        (x.submeshes for x in chain(family_layouts, allowed_baselines(limits))), ranks
    )
    if not any(all(map(allowed, submeshes)) for submeshes in placements):
        raise ValueError(NO_SUBMESHES)


def explain_no_fit(context: SearchContext, min_bytes: float, smallest: str) -> str:
    """One line: what comes nearest, by how much it exceeds a device, and what would hold it."""
    memory_bytes, config = context.spec.memory_bytes, context.spec.config
    if not memory_bytes or min_bytes <= memory_bytes:
        return NO_SUBMESHES
    missing_gib = (min_bytes - memory_bytes) / GIB
    n_devices = _devices_that_fit(context)
    larger = [h.name for h in HARDWARE.values() if h.plannable_bytes >= min_bytes]
    remedies = [f"{n_devices} devices would do"] if n_devices else []
    if larger and context.profile.computed:
        chips = " or ".join(larger)
        remedies.append(f"so would {chips}" if n_devices else f"{chips} would do")
    remedies += [
        f"a larger plan.max_model ({config.max_model}), plan.max_stage ({config.max_stage}) or "
        f"plan.max_microbatches ({config.max_microbatches}) or smaller samples need less"
    ]
    return (
        f"no plan fits into {memory_bytes / GIB:.2f} GiB per device: the smallest "
        f"({smallest}) needs {missing_gib:.2f} GiB more; {', '.join(remedies)}"
    )


def _devices_that_fit(context: SearchContext) -> int | None:
    """The least doubling of the devices that holds a plan."""
    multiple = 2
    while multiple <= _LARGEST_MULTIPLE:
        spec = replace(context.spec, n_devices=multiple * context.spec.n_devices)
        if any(space.fits.any() for space in search_spaces(replace(context, spec=spec))):
            return spec.n_devices
        multiple *= 2
    return None
