"""Plans a run, explains the plan, and refuses configurations that cannot be planned or trained."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from dflop_jax.config import Config
from dflop_jax.config_fields import parse_profile_steps
from dflop_jax.contract import SAVED_NAMES, Module, edges_of, layer_kinds_of, working_dtype_of
from dflop_jax.hardware import GIB
from dflop_jax.plan.baselines import BaselinePlans, quick_baselines
from dflop_jax.plan.evaluate import PlanEvaluator
from dflop_jax.plan.explain import Saving, check_placement_exists, savings
from dflop_jax.plan.placement import SpaceLimits
from dflop_jax.plan.refine_buckets import with_spare_bucket
from dflop_jax.plan.search import SearchResult, build_evaluator, search_plan
from dflop_jax.plan.search_spec import SearchSpec, with_limits
from dflop_jax.plan.structures import StructureCost, structure_costs
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.traced_parts import TraceSpec, divides, parameter_dims, residual_bytes
from dflop_jax.records import (
    ModelProfile,
    Plan,
    PriceList,
    Profile,
    Remat,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    layer_key,
)
from dflop_jax.records.files import digest, load_or_compute
from dflop_jax.report.wall_time import PLAN
from dflop_jax.runtime.layout import can_form_submesh
from dflop_jax.runtime.module_parts import segment_parts
from dflop_jax.schedule.baselines import Baseline, Baselines
from dflop_jax.schedule.worker import BASELINE_INTERVAL
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.profiling import (
    OnProgress,
    start_budget,
    tensor_degrees,
    with_default_degrees,
)
from dflop_jax.train.run_context import RunContext
from dflop_jax.train.trials import MAX_TRIALS, max_trials

SHOWN_PLACEMENTS = 10  # placements that an explanation compares; each is simulated exactly


def make_plan(
    context: RunContext, profile: Profile, on_progress: OnProgress | None = None, **options: Any
) -> SearchResult:
    """Return the policy's best plan for this model, data and devices; `options` are those of
    `search_plan`. ValueError if the profile is of another model, or no plan fits."""
    arguments = {**_search_arguments(context, profile), **options}
    return search_plan(profile.model, profile.data, **arguments, on_progress=on_progress)


def max_alternatives(context: RunContext, profile: Profile, first_step: int) -> int:
    """Return how many plans besides the best one a run tries within its start's budget."""
    n_plans, budget = max_trials(context.config, first_step), start_budget(context, profile)
    return min(n_plans, budget.n_plans if budget else n_plans) - 1


def load_baselines(
    context: RunContext, profile: Profile, plan: Plan, n_steps: int
) -> Baselines | None:
    """Return what `n_steps` under this plan are compared with, priced by its profile; the plans
    come from the cache folder if possible. None if the plan is a baseline's, or steps are few."""
    if plan.scheduling.grouping != "balanced" or n_steps < BASELINE_INTERVAL:
        return None
    with context.time_log.track(PLAN):
        return _find_baselines(context, profile, plan)


def _find_baselines(context: RunContext, profile: Profile, plan: Plan) -> Baselines:
    arguments = _search_arguments(context, profile)
    # One batch, or several of 512 samples in all: the plans need not be the very best.
    changes = {"policy": "blind", "submeshes": "any", "loop": "any", "sampled_batches": 1}
    blind = replace(arguments["config"], **changes)
    spec = SearchSpec(**arguments | {"config": blind})
    evaluator = build_evaluator(profile.model, profile.data, spec)
    values = {n: v for n, v in vars(spec).items() if not callable(v)}
    facts = profile, values, sorted(context.trained.frozen)
    file = Path(context.config.cache_dir, f"baselines-{digest(facts)}.json")
    tail = profile.data.tail
    plans = load_or_compute(BaselinePlans, file, lambda: quick_baselines(evaluator)).by_name
    plans = {name: with_spare_bucket(one, tail, evaluator) for name, one in plans.items()}

    def price(one: Plan) -> PriceList:
        return PriceList.from_prices(evaluator.context.price_layout(one.layout, one.policy))

    baselines = {
        name: Baseline(one, price(one), tuple(evaluator.context.trainable(one.layout)))
        for name, one in plans.items()
    }
    return Baselines(baselines, price(plan))


def explain_memory_savings(context: RunContext, profile: Profile, plan: Plan) -> list[Saving]:
    """Return the memory that each module of a plan saves, and what this costs in seconds."""
    return savings(_build_evaluator(context, profile), plan)


def explain_structures(
    context: RunContext, profile: Profile, result: SearchResult
) -> list[StructureCost]:
    """Return what separate submeshes and a loop would cost over the chosen plan."""
    evaluator = _build_evaluator(context, profile)
    return structure_costs(evaluator, result.plan, result.candidates, profile.data.tail)


def _build_evaluator(context: RunContext, profile: Profile) -> PlanEvaluator:
    spec = SearchSpec(**_search_arguments(context, profile))
    return build_evaluator(profile.model, profile.data, spec)


def _search_arguments(context: RunContext, profile: Profile) -> dict[str, Any]:
    config, model = context.config, context.model
    check_layers(context, profile, "the profile", "profile again")
    check_named_remat(context)
    frozen = context.trained.frozen
    plan_config = replace(config.plan, node=context.node)
    if budget := start_budget(context, profile):
        plan_config = replace(plan_config, effort=budget.effort, buckets=budget.n_buckets)

    def trains(s: SegmentPlan) -> bool:
        module = model.modules[s.module]
        return any(module.freeze_groups[p] not in frozen for p in segment_parts(s, module))

    return {
        "n_devices": context.n_devices,
        "global_batch": config.train.global_batch,
        "config": plan_config,
        "memory_bytes": context.plannable_bytes,
        "remat": config.train.remat,
        "zero": "auto" if config.plan.zero == "auto" else int(config.plan.zero),
        "steps": config.train.steps,
        "token_multiple": context.token_multiple,
        "trains": trains,
        "allowed": partial(_is_allowed_submesh, context),
    }


def _is_allowed_submesh(context: RunContext, m: SubmeshPlan) -> bool:
    devices = context.devices
    return not devices or can_form_submesh(devices[m.first : m.devices.stop])


def check_layers(context: RunContext, profile: Profile, profile_name: str, remedy: str) -> None:
    """Raise ValueError if a profile is of another model."""
    modules, problem = context.model.modules, ""
    layers = {name: m.n_layers for name, m in modules.items()}
    if profile.model.n_layers != layers:
        problem = f"with layers {profile.model.n_layers}, this one has {layers}"
    elif changed_kinds := [
        n for n, m in modules.items() if profile.model.layer_kinds(n) != layer_kinds_of(m)
    ]:
        problem = f"whose layers of {changed_kinds[0]!r} are of other kinds"
    if problem:
        raise ValueError(f"{profile_name} is of a model {problem}; {remedy}")


def check_plannable(context: RunContext) -> None:
    """Raise ValueError, before measuring, if the policy has no placement, or if the model's state
    alone exceeds the memory."""
    check_named_remat(context)
    modules, config = context.model.modules, with_default_degrees(context)
    kinds = {name: layer_kinds_of(m) for name, m in modules.items()}
    degrees = {
        name: [d for d in tensor_degrees(context) if divides(m, d)] for name, m in modules.items()
    }
    limits = SpaceLimits.from_model(
        kinds, degrees, edges_of(context.model), context.n_devices, context.node, config
    )
    check_placement_exists(limits, partial(_is_allowed_submesh, context))
    limit, min_bytes = context.plannable_bytes, min_state_bytes(context)
    if limit and min_bytes > limit:
        raise ValueError(
            f"no plan fits into {limit / GIB:.2f} GiB per device: parameters, gradients and "
            f"optimizer state, split over all {context.n_devices} devices, need "
            f"{min_bytes / GIB:.2f} GiB each; use more devices or more memory, or train less "
            "(train.stage, train.freeze, train.lora_rank)"
        )


def min_state_bytes(context: RunContext) -> float:
    """Return the bytes of the model's state per device if split evenly: any plan's lower bound."""
    tx, n_bytes = make_optimizer(context.config.train), 0.0
    dims_by_layer = parameter_dims(context.model, tx, context.trained.frozen)
    for name, module in context.model.modules.items():
        # Gradients and, if programs read another dtype, masters.
        copies = 2 if working_dtype_of(module).itemsize < 4 else 1
        kinds = Counter(layer_kinds_of(module)).items()
        layers = [(dims_by_layer["layer_dims"][layer_key(name, kind)], n) for kind, n in kinds]
        for dims, n in [*layers, (dims_by_layer["ends_dims"][name], 1)]:
            for p in dims:
                trained = copies * p.trained_bytes + p.element_state_bytes
                n_bytes += n * prod(p.sizes) * (p.working_bytes + trained)
    return n_bytes / context.n_devices


def check_named_remat(context: RunContext) -> None:
    """Raise ValueError if values are to be saved by name and a module's layers name none."""
    if context.config.train.remat != "named":
        return
    for name, module in context.model.modules.items():
        shape = Shape(1, context.model.piece_tokens.get(name, context.token_multiple))
        n_bytes = _max_residual_bytes(module, shape, "named")
        if n_bytes <= _max_residual_bytes(module, shape, "layers"):
            raise ValueError(
                f"train.remat=named: the layers of {name!r} name no value to save; use layers or "
                f"dots, or name one ({', '.join(SAVED_NAMES)})"
            )


def _max_residual_bytes(module: Module, shape: Shape, remat: Remat) -> float:
    """Return the residual bytes of the largest kind of layer of a module."""
    kinds = single_kind_modules(module).values()
    return max(residual_bytes(TraceSpec(kind, "layers", shape, remat=remat), 2) for kind in kinds)


@dataclass(frozen=True)
class WhatIf:
    """A change, and the seconds of the best placement under it for the same number of samples, with
    one bucket; None: nothing fits."""

    change: str
    makespan_s: float | None


def evaluate_changes(
    context: RunContext, profile: Profile, on_progress: OnProgress | None = None
) -> list[WhatIf]:
    """Return the results of searches that each change one thing, first of the unchanged state."""
    arguments, model = _search_arguments(context, profile), profile.model
    # All searches use the limits of the unchanged state; otherwise a smaller need would look worse.
    spec = with_limits(SearchSpec(**arguments), model, profile.data.loads)
    arguments["config"] = spec.config
    n, batch, limit = (arguments[k] for k in ("n_devices", "global_batch", "memory_bytes"))
    changes: list[tuple[str, dict[str, Any], ModelProfile]] = [("as it is", {}, model)]
    if limit:
        changes.append(("twice the memory", {"memory_bytes": 2 * limit}, model))
    if model.hardware:
        changes.append(("links 8x", {}, replace(model, hardware=model.hardware.with_links(8))))
    for module in list(model.n_layers)[:-1]:
        timings = tuple(t.scaled(0.5) if t.module == module else t for t in model.timings)
        changes.append((f"half the work in {module}", {}, replace(model, timings=timings)))
    changes.append(("twice the global batch", {"global_batch": 2 * batch}, model))
    more_devices: dict[str, Any] = {"n_devices": 2 * n}
    if context.devices:
        more_devices["allowed"] = lambda _: True
        model = replace(model, concurrency=2 * model.concurrency)
    changes.append(("twice the devices", more_devices, model))
    answers: list[WhatIf] = []
    for change, options, changed_model in changes:
        options = {**arguments, **options, "n_shown": 1, "refine": False}
        makespan_s = None
        with suppress(ValueError):
            result = search_plan(changed_model, profile.data, **options)
            makespan_s = batch / options["global_batch"] * result.candidates[0].makespan_s
        answers.append(WhatIf(change, makespan_s))
        if on_progress:
            on_progress(len(answers), len(changes))
    return answers


def check_trainable(config: Config) -> None:
    """Raise ValueError if flags of a training run contradict each other."""
    plan, checkpoint, train, data = config.plan, config.checkpoint, config.train, config.data
    held_out_flag = "data.factory" if data.factory else "data.eval_path" if data.eval_path else ""
    reason = "a data.factory provides its own" if data.factory else "train.eval_samples is 0"
    stop_step = parse_profile_steps(train.profile_steps).stop
    problems: tuple[tuple[object, str], ...] = (
        (
            plan.hardware,
            f"plan.hardware={plan.hardware} plans for devices that this machine lacks; leave it "
            "empty to train",
        ),
        (
            plan.redecide_every and not checkpoint.saves,
            f"plan.redecide_every={plan.redecide_every} changes plans through a checkpoint where "
            "memory has no room to move the state, and checkpoint.every_s=0 writes none; leave it "
            "at 600",
        ),
        (
            plan.trials > 0 and plan.policy != "auto",
            f"plan.trials={plan.trials} compares plans of several policies, and "
            f"plan.policy={plan.policy} has one; omit it, or set plan.policy to auto",
        ),
        (
            plan.trials > 0 and not checkpoint.saves,
            f"plan.trials={plan.trials} saves a checkpoint after each trial, and "
            "checkpoint.every_s=0 writes none; leave it at 600",
        ),
        (
            MAX_TRIALS * plan.trials > train.steps and not train.epochs,
            f"plan.trials={plan.trials} takes up to {MAX_TRIALS * plan.trials} steps, for "
            f"{MAX_TRIALS} plans, and train.steps is {train.steps}; give at most "
            f"{train.steps // MAX_TRIALS}",
        ),
        (
            checkpoint.keep_best and not (checkpoint.saves and train.evaluates),
            "checkpoint.keep_best needs checkpoints and held-out losses; give checkpoint.every_s, "
            "train.eval_samples and train.eval_every",
        ),
        (
            train.eval_every and not train.evaluates,
            f"train.eval_every={train.eval_every} evaluates nothing: no sample is held out; give "
            "train.eval_samples or train.eval_fraction",
        ),
        (
            data.eval_path and (data.factory or not train.eval_samples),
            f"data.eval_path={data.eval_path} is not evaluated on: {reason}; omit it, or set "
            "train.eval_samples",
        ),
        (
            train.eval_fraction and held_out_flag,
            f"train.eval_fraction={train.eval_fraction:g}: {held_out_flag} already sets the "
            "held-out samples; omit one of them",
        ),
        (
            stop_step > train.steps and not train.epochs,  # their steps follow from the data
            f"train.profile_steps={train.profile_steps}, but with train.steps={train.steps} the "
            f"last step is number {train.steps - 1}; choose earlier ones",
        ),
    )
    for is_refused, message in problems:
        if is_refused:
            raise ValueError(message)
