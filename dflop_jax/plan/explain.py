"""Explanations of a search: why placements are slower, what memory options cost, why none fits."""

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
from dflop_jax.plan.memory import options_of, with_options
from dflop_jax.plan.module_tables import SearchContext
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
from dflop_jax.schedule.costs import TIE_TOLERANCE

NO_SUBMESHES = "no placement can be formed from these devices; use another number of devices"
# Maximum multiple of the available devices that a message proposes; doubling it adds one search if
# nothing fits.
_LARGEST_MULTIPLE = 64


def explain_slowdown(candidate: Candidate, fastest: Candidate) -> str:
    """Describe in a few words why a placement is slower than the fastest."""
    if candidate == fastest:
        return ""
    step_s, fastest_s = candidate.makespan_s, fastest.makespan_s
    slower = f"+{max(0.0, step_s / fastest_s - 1):.1%}: "
    by_busy_s = [(s, name) for name, s in candidate.busy_s.items()]
    (busiest_s, busiest), (idlest_s, idlest) = max(by_busy_s), min(by_busy_s)
    if busiest_s >= fastest_s:
        return f"{slower}{busiest} alone computes {1e3 * busiest_s:.1f} ms"
    if fastest.busy_s and busiest_s > max(fastest.busy_s.values()):
        waits = f"{idlest} waits {1 - idlest_s / step_s:.0%}"
        return f"{slower}{busiest} computes {1e3 * busiest_s:.1f} ms, {waits}"
    return f"{slower}even {busiest}, the busiest, waits {1 - busiest_s / step_s:.0%}"


@dataclass(frozen=True)
class KindCost:
    """Time of a module's layers of one kind, with pieces per token as in the data."""

    module: str
    kind: str
    layers: int  # number
    shape: Shape  # the largest timed at the smallest tensor-parallel degree
    forward_s: float  # of one layer
    backward_s: float
    share: float  # of the time of all layers of the module


def kind_costs(profile: Profile) -> list[KindCost]:
    """Return the cost of each module's kinds of layers."""
    costs, model, loads = [], profile.model, profile.data.loads
    for module in model.n_layers:
        names, of_module = model.features(module), []
        n_tokens = max(sum(load.tokens(module) for load in loads), 1)
        per_token = piece_content(loads, module).sum(axis=1) / n_tokens
        for kind, n in Counter(model.layer_kinds(module)).items():
            timed = [t for t in model.timings if (t.module, t.kind) == (module, kind)]
            t = min(timed, key=lambda t: (t.model, -t.shape.size))
            content = (t.shape.size * per_token).tolist()
            forward_s, backward_s = (
                float(content_seconds(order_coefficients(by_name, names), content))
                for by_name in (t.content_forward_s, t.content_backward_s)
            )
            seconds = t.layer_forward_s + forward_s, t.layer_backward_s + backward_s
            of_module.append(KindCost(module, kind, n, t.shape, *seconds, n * sum(seconds)))
        total_s = sum(c.share for c in of_module) or 1.0
        costs += [replace(c, share=c.share / total_s) for c in of_module]
    return costs


@dataclass(frozen=True)
class Saving:
    """Bytes saved and seconds lost by a module's memory option, relative to the next faster one."""

    module: str
    chosen: str  # description of the option; "none" saves nothing
    cheaper: str
    saved_bytes: float  # maximum over the module's devices
    extra_step_s: float  # per step
    fits: bool  # whether the faster option would also fit into memory


def savings(evaluator: PlanEvaluator, plan: Plan) -> list[Saving]:
    """Return the saving of each module whose option saves memory."""
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
            bought = other_bytes - n_bytes, step_s - other_s
            module_savings.append(Saving(module, *words, *bought, evaluator.fits(both[1])))
    return module_savings


def check_placement_exists(limits: SpaceLimits, allowed: Callable[[SubmeshPlan], bool]) -> None:
    """Raise ValueError, as `search_plan` does, if no placement has only `allowed` submeshes."""
    families = chain.from_iterable(search_families(limits).values())
    layouts = (f.layout(i, limits.n_layers) for f in families for i in range(len(f)))
    ranks = rank_submeshes(limits) if limits.config.policy in (DIP, "auto") else []
    placements = chain((x.submeshes for x in chain(layouts, allowed_baselines(limits))), ranks)
    if not any(all(map(allowed, submeshes)) for submeshes in placements):
        raise ValueError(NO_SUBMESHES)


def explain_no_fit(context: SearchContext, min_bytes: float, smallest: str) -> str:
    """Return one line with the smallest candidate, the bytes per device it lacks, and remedies."""
    memory_bytes, config = context.spec.memory_bytes, context.spec.config
    if not memory_bytes or min_bytes <= memory_bytes:
        return NO_SUBMESHES
    # Find the smallest power-of-two multiple of the devices on which a plan fits.
    n_devices, n = 0, 2
    while not n_devices and n <= _LARGEST_MULTIPLE:
        spec = replace(context.spec, n_devices=n * context.spec.n_devices)
        if any(space.fits.any() for space in search_spaces(replace(context, spec=spec))):
            n_devices = spec.n_devices
        n *= 2
    larger = [h.name for h in HARDWARE.values() if h.plannable_bytes >= min_bytes]
    remedies = [f"it would fit on {n_devices} devices"] if n_devices else []
    if larger and context.profile.computed:
        names = " or ".join(larger)
        remedies.append(f"or on {names}" if n_devices else f"it would fit on {names}")
    remedies += [
        f"a larger plan.max_model ({config.max_model}), plan.max_stage ({config.max_stage}) or "
        f"plan.max_microbatches ({config.max_microbatches}) or smaller samples need less memory"
    ]
    return (
        f"no plan fits into {memory_bytes / GIB:.2f} GiB per device: the smallest ({smallest}) "
        f"needs {(min_bytes - memory_bytes) / GIB:.2f} GiB more; {', '.join(remedies)}"
    )
