"""Explains a search: why other placements lost, why nothing fits, and what would."""

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
from dflop_jax.plan.evaluate import PlanEvaluator
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
# Maximum multiple of the devices at hand that a message proposes; twice as much is one more search,
# only where nothing fits.
_LARGEST_MULTIPLE = 64


def explain_loss(candidate: Candidate, fastest: Candidate) -> str:
    """Why a placement is slower than the fastest, in a few words."""
    if candidate == fastest:
        return ""
    busy_s, step_s, fastest_s = candidate.busy_s, candidate.makespan_s, fastest.makespan_s
    slower = f"+{max(0.0, step_s / fastest_s - 1):.1%}: "
    busiest, idlest = (f(busy_s, key=busy_s.__getitem__) for f in (max, min))
    busiest_s = busy_s[busiest]
    if busiest_s >= fastest_s:
        return f"{slower}{busiest} alone computes {1e3 * busiest_s:.1f} ms"
    if fastest.busy_s and busiest_s > max(fastest.busy_s.values()):
        waits = f"{idlest} waits {1 - busy_s[idlest] / step_s:.0%}"
        return f"{slower}{busiest} computes {1e3 * busiest_s:.1f} ms, {waits}"
    return f"{slower}even {busiest}, the busiest, waits {1 - busiest_s / step_s:.0%}"


@dataclass(frozen=True)
class KindCost:
    """Seconds of the layers of one kind of a module, with rows as full of pieces as in the data.

    Attributes:
      layers: number of layers.
      forward_s, backward_s: of one layer, on one tensor rank of the smallest timed degree, at the
        largest shape timed there.
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
    """Costs of layers, by module and kind."""
    costs, model, loads = [], profile.model, profile.data.loads
    for module in model.n_layers:
        names, of_module = model.features(module), []
        per_token = piece_content(loads, module).sum(axis=1)
        per_token = per_token / max(sum(load.tokens(module) for load in loads), 1)
        for kind, n in Counter(model.layer_kinds(module)).items():
            timed = [t for t in model.timings if (t.module, t.kind) == (module, kind)]
            t = min(timed, key=lambda t: (t.model, -t.shape.size))
            content = (t.shape.size * per_token).tolist()
            forward_s, backward_s = (
                static_s + float(content_seconds(order_coefficients(by_name, names), content))
                for static_s, by_name in (
                    (t.layer_forward_s, t.content_forward_s),
                    (t.layer_backward_s, t.content_backward_s),
                )
            )
            of_module.append(KindCost(module, kind, n, t.shape, forward_s, backward_s, 0.0))
        layers_s = [c.layers * (c.forward_s + c.backward_s) for c in of_module]
        total_s = sum(layers_s) or 1.0
        costs += [replace(c, share=s / total_s) for c, s in zip(of_module, layers_s, strict=True)]
    return costs


@dataclass(frozen=True)
class Saving:
    """Memory that a module's option saves and time that it costs, against the next cheaper option.

    Attributes:
      chosen, cheaper: both options in words; "none" saves nothing.
      saved_bytes: of the module's fullest device.
      paid_s: of a step.
      fits: whether memory would hold the cheaper option, too.
    """

    module: str
    chosen: str
    cheaper: str
    saved_bytes: float
    paid_s: float
    fits: bool


def savings(evaluator: PlanEvaluator, plan: Plan) -> list[Saving]:
    """The saving of each module of a plan that saves memory."""
    module_savings = []
    for module, option in options_of(plan.layout).items():
        plans = {o: with_options(plan, {module: o}) for o in evaluator.context.options(module)}
        busy_s = {o: evaluator.busy_s(p.layout) for o, p in plans.items()}
        cheaper = [o for o in plans if busy_s[o] < busy_s[option] * (1 - TIE_TOLERANCE)]
        if option not in plans or not cheaper:
            continue
        cheaper_option = max(cheaper, key=busy_s.__getitem__)
        both = plans[option], plans[cheaper_option]
        step_s, other_s = (evaluator.evaluate(p, 0.0).predicted.makespan_s for p in both)
        meshes = {s.submesh for s in plan.layout.segments_of(module)}
        n_bytes, other_bytes = (
            max(peak for name, peak in evaluator.peak_bytes_limit(p).items() if name in meshes)
            for p in both
        )
        if n_bytes < other_bytes:
            words = option.description or "none", cheaper_option.description or "none"
            fits = evaluator.fits(plans[cheaper_option])
            module_savings.append(
                Saving(module, *words, other_bytes - n_bytes, step_s - other_s, fits)
            )
    return module_savings


def check_placement_exists(limits: SpaceLimits, allowed: Callable[[SubmeshPlan], bool]) -> None:
    """ValueError, as `search_plan` would raise it, unless the policy has a placement whose
    submeshes are `allowed`; no measurement changes that."""
    families = chain.from_iterable(search_families(limits).values())
    layouts = (f.layout(i, limits.n_layers) for f in families for i in range(len(f)))
    ranks = rank_submeshes(limits) if limits.config.policy in (DIP, "auto") else []
    placements = chain((x.submeshes for x in chain(layouts, allowed_baselines(limits))), ranks)
    if not any(all(map(allowed, submeshes)) for submeshes in placements):
        raise ValueError(NO_SUBMESHES)


def explain_no_fit(context: SearchContext, min_bytes: float, smallest: str) -> str:
    """One line: the candidate of least memory, how much it exceeds a device, and what would hold
    it."""
    memory_bytes, config = context.spec.memory_bytes, context.spec.config
    if not memory_bytes or min_bytes <= memory_bytes:
        return NO_SUBMESHES
    n_devices = _devices_that_fit(context)
    larger = [h.name for h in HARDWARE.values() if h.plannable_bytes >= min_bytes]
    remedies = [f"{n_devices} devices would do"] if n_devices else []
    if larger and context.profile.computed:
        names = " or ".join(larger)
        remedies.append(f"so would {names}" if n_devices else f"{names} would do")
    remedies += [
        f"a larger plan.max_model ({config.max_model}), plan.max_stage ({config.max_stage}) or "
        f"plan.max_microbatches ({config.max_microbatches}) or smaller samples need less"
    ]
    return (
        f"no plan fits into {memory_bytes / GIB:.2f} GiB per device: the smallest ({smallest}) "
        f"needs {(min_bytes - memory_bytes) / GIB:.2f} GiB more; {', '.join(remedies)}"
    )


def _devices_that_fit(context: SearchContext) -> int | None:
    """The smallest power of two times the devices that holds a plan; None: none up to the limit."""
    multiple = 2
    while multiple <= _LARGEST_MULTIPLE:
        spec = replace(context.spec, n_devices=multiple * context.spec.n_devices)
        if any(space.fits.any() for space in search_spaces(replace(context, spec=spec))):
            return spec.n_devices
        multiple *= 2
    return None
