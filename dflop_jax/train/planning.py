"""From a workplace and its profile to the plan, and to what could be better."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from dflop_jax.config import Config
from dflop_jax.config_fields import profiled_steps
from dflop_jax.contract import SAVED_NAMES, edges_of, layer_kinds_of, working_dtype_of
from dflop_jax.data import Source
from dflop_jax.hardware import GIB
from dflop_jax.plan.explain import Saving, check_placement_exists, savings
from dflop_jax.plan.placement import SpaceLimits
from dflop_jax.plan.search import SearchResult, build_evaluator, search_plan
from dflop_jax.plan.search_spec import SearchSpec, with_limits
from dflop_jax.profile.optimizer_state import FLOAT32_BYTES, parameter_dims
from dflop_jax.profile.shallow import single_kind_modules
from dflop_jax.profile.traced_parts import TraceSpec, divides, residual_bytes
from dflop_jax.records import (
    ModelProfile,
    Plan,
    Profile,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    layer_key,
)
from dflop_jax.runtime.layout import can_join
from dflop_jax.runtime.module_parts import segment_parts
from dflop_jax.train.optimizer import make_optimizer
from dflop_jax.train.profiling import (
    OnProgress,
    tensor_degrees,
    with_default_degrees,
)
from dflop_jax.train.run_context import RunContext

SHOWN_PLACEMENTS = 10  # that an explanation compares; each more is made exact


def make_plan(
    context: RunContext, profile: Profile, on_progress: OnProgress | None = None, **options: Any
) -> SearchResult:
    """Return the policy's best plan for this model, data and devices; `options` are
    `search_plan`'s.

    Raises:
      ValueError: the profile is of another model, or no plan fits.
    """
    return search_plan(
        profile.model, profile.data, **{**_search_arguments(context, profile), **options},
        on_progress=on_progress,
    )  # fmt: skip


def explain_memory_savings(context: RunContext, profile: Profile, plan: Plan) -> list[Saving]:
    """Return what each module of a plan that saves memory gets for the time that it costs."""
    spec = SearchSpec(**_search_arguments(context, profile))
    return savings(build_evaluator(profile.model, profile.data, spec), plan)


def _search_arguments(context: RunContext, profile: Profile) -> dict[str, Any]:
    config, model = context.config, context.model
    check_layers(context, profile, "the profile", "profile again")
    check_named_remat(context)
    frozen = context.trained.frozen

    def trains(s: SegmentPlan) -> bool:
        module = model.modules[s.module]
        return any(module.freeze_groups[p] not in frozen for p in segment_parts(s, module))

    return {
        "n_devices": context.n_devices,
        "global_batch": config.train.global_batch,
        "config": replace(config.plan, node=context.node),
        "memory_bytes": context.plannable_bytes,
        "remat": config.train.remat,
        "zero": "auto" if config.plan.zero == "auto" else int(config.plan.zero),
        "token_multiple": context.token_multiple,
        "trains": trains,
        "allowed": partial(_is_allowed_submesh, context),
    }


def _is_allowed_submesh(context: RunContext, m: SubmeshPlan) -> bool:
    devices = context.devices
    return not devices or can_join(devices[m.first : m.devices.stop])


def check_layers(context: RunContext, profile: Profile, profile_name: str, remedy: str) -> None:
    """ValueError where a profile is of another model."""
    modules = context.model.modules
    layers = {name: m.n_layers for name, m in modules.items()}
    if profile.model.n_layers != layers:
        raise ValueError(
            f"{profile_name} is of a model with layers {profile.model.n_layers}, this one has "
            f"{layers}; {remedy}"
        )
    for name, module in modules.items():
        if profile.model.layer_kinds(name) != layer_kinds_of(module):
            raise ValueError(
                f"{profile_name} is of a model whose layers of {name!r} are of other kinds; "
                f"{remedy}"
            )


def check_plannable(context: RunContext) -> None:
    """ValueError, before anything is measured, where no plan can be made whatever is measured: the
    policy has no placement, or the model's state alone is more than memory holds."""
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
            f"{min_bytes / GIB:.2f} GiB of each; take more devices or more memory, or train less "
            "(train.stage, train.freeze, train.lora_rank)"
        )


def min_state_bytes(context: RunContext) -> float:
    """Bytes of the model's state on a device, where every bit of it is split over all devices: more
    than that is needed by any plan."""
    tx, n_bytes = make_optimizer(context.config.train), 0.0
    dims_by_layer = parameter_dims(context.model, tx, context.trained.frozen)
    for name, module in context.model.modules.items():
        # Gradients and, where programs read other parameters, masters.
        copies = 2 if working_dtype_of(module).itemsize < FLOAT32_BYTES else 1
        kinds = Counter(layer_kinds_of(module)).items()
        layers = [(dims_by_layer["layer_dims"][layer_key(name, kind)], n) for kind, n in kinds]
        for dims, n in [*layers, (dims_by_layer["ends_dims"][name], 1)]:
            for p in dims:
                trained = p.trains * copies * FLOAT32_BYTES + p.element_state_bytes
                n_bytes += n * prod(p.sizes) * (p.working_bytes + trained)
    return n_bytes / context.n_devices


def check_named_remat(context: RunContext) -> None:
    """ValueError where values are to be kept by name and a module's layers name none."""
    if context.config.train.remat != "named":
        return
    for name, module in context.model.modules.items():
        shape = Shape(1, context.model.piece_tokens.get(name, context.token_multiple))
        modules_by_kind = single_kind_modules(module).values()
        named_bytes, layers_bytes = (
            max(
                residual_bytes(TraceSpec(module_of_kind, "layers", shape, remat=remat), 2)
                for module_of_kind in modules_by_kind
            )
            for remat in ("named", "layers")
        )
        if named_bytes <= layers_bytes:
            raise ValueError(
                f"train.remat=named: the layers of {name!r} name no value to keep; take layers or "
                f"dots, or have them name one ({', '.join(SAVED_NAMES)})"
            )


@dataclass(frozen=True)
class WhatIf:
    """A change, and the seconds that the best placement then takes for a global batch of as many
    samples as before, with one bucket; None: nothing fits."""

    change: str
    makespan_s: float | None


def evaluate_changes(
    context: RunContext, profile: Profile, on_progress: OnProgress | None = None
) -> list[WhatIf]:
    """Return what searches with one thing changed each come to, the present state first."""
    arguments = _search_arguments(context, profile)
    # All look as far as the present state does, else less need would look worse.
    arguments["config"] = with_limits(
        SearchSpec(**arguments), profile.model, profile.data.loads
    ).config
    batch, limit = arguments["global_batch"], arguments["memory_bytes"]
    sources = list(profile.model.n_layers)[:-1]
    changes: list[tuple[str, dict[str, Any], ModelProfile]] = [("as it is", {}, profile.model)]
    if limit:
        changes.append(("twice the memory", {"memory_bytes": 2 * limit}, profile.model))
    if hardware := profile.model.hardware:
        faster_links = hardware.with_links(8)
        changes.append(("links 8x", {}, replace(profile.model, hardware=faster_links)))
    for m in sources:
        changes.append((f"half the work in {m}", {}, _halve_seconds(profile.model, m)))
    changes.append(("twice the global batch", {"global_batch": 2 * batch}, profile.model))
    changes.append(("twice the devices", {"n_devices": 2 * arguments["n_devices"]}, profile.model))
    answers = []
    for change, options, model in changes:
        if "n_devices" in options and context.devices:
            options = {**options, "allowed": lambda _: True}
            model = replace(model, concurrency=2 * model.concurrency)
        try:
            result = search_plan(
                model, profile.data, **{**arguments, **options}, n_shown=1, refine=False
            )
            scale = batch / options.get("global_batch", batch)
            answers.append(WhatIf(change, scale * result.candidates[0].makespan_s))
        except ValueError:
            answers.append(WhatIf(change, None))
        if on_progress:
            on_progress(len(answers), len(changes))
    return answers


def _halve_seconds(profile: ModelProfile, module: str) -> ModelProfile:
    """Return the profile with half the seconds in a module."""
    timings = tuple(t.scaled(0.5) if t.module == module else t for t in profile.timings)
    return replace(profile, timings=timings)


def check_trainable(config: Config) -> None:
    """ValueError where a configuration only plans, is to trace steps that it does not have, to
    change plans without checkpoints, or to go by what it does not evaluate or save."""
    if config.plan.hardware:
        raise ValueError(
            f"plan.hardware={config.plan.hardware} plans for devices that are not here; leave it "
            "empty to train"
        )
    if config.plan.redecide_every and not config.checkpoint.saves:
        raise ValueError(
            f"plan.redecide_every={config.plan.redecide_every} changes plans through a checkpoint, "
            "and checkpoint.every_s=0 writes none; leave it at 600"
        )
    if config.checkpoint.keep_best and not (config.checkpoint.saves and config.train.evaluates):
        raise ValueError(
            "checkpoint.keep_best needs checkpoints and held-out losses; give checkpoint.every_s, "
            "train.eval_samples and train.eval_every"
        )
    if config.train.eval_every and not config.train.evaluates:
        raise ValueError(
            f"train.eval_every={config.train.eval_every} evaluates nothing: no sample is held out; "
            "give train.eval_samples or train.eval_fraction"
        )
    if config.data.eval_path and (config.data.factory or not config.train.eval_samples):
        reason = "a data.factory has its own" if config.data.factory else "train.eval_samples is 0"
        raise ValueError(
            f"data.eval_path={config.data.eval_path} is not evaluated on: {reason}; leave it out, "
            "or say how many samples"
        )
    if (eval_fraction := config.train.eval_fraction) and (
        config.data.factory or config.data.eval_path
    ):
        flag = "data.factory" if config.data.factory else "data.eval_path"
        raise ValueError(
            f"train.eval_fraction={eval_fraction:g}: {flag} says what is held out; leave one of "
            "them out"
        )
    stop_step = profiled_steps(config.train.profile_steps).stop
    if stop_step > config.train.steps and not config.train.epochs:  # whose steps the data say
        raise ValueError(
            f"train.profile_steps={config.train.profile_steps}, but with train.steps="
            f"{config.train.steps} the last step is number {config.train.steps - 1}; choose "
            "earlier ones"
        )


def check_held_out(config: Config, source: Source) -> None:
    """ValueError where nothing is held out to evaluate on."""
    if not len(source):
        raise ValueError(
            f"train.eval_samples={config.train.eval_samples}, but {source.name} holds out no "
            "sample; set it to 0, or give more data"
        )
