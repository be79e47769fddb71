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
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import (
    OnProgress,
    tensor_degrees,
    with_degrees,
)

SHOWN_PLACEMENTS = 10  # that an explanation compares; each more is made exact


def make_plan(
    place: Workplace, profile: Profile, on_progress: OnProgress | None = None, **options: Any
) -> SearchResult:
    """Return the policy's best plan for this model, data and devices; `options` are
    `search_plan`'s.

    Raises:
      ValueError: the profile is of another model, or no plan fits.
    """
    return search_plan(
        profile.model, profile.data, **{**_arguments(place, profile), **options},
        on_progress=on_progress,
    )  # fmt: skip


def what_memory_bought(place: Workplace, profile: Profile, plan: Plan) -> list[Saving]:
    """Return what each module of a plan that saves memory gets for the time that it costs."""
    spec = SearchSpec(**_arguments(place, profile))
    return savings(build_evaluator(profile.model, profile.data, spec), plan)


def _arguments(place: Workplace, profile: Profile) -> dict[str, Any]:
    config, model = place.config, place.model
    check_layers(place, profile, "the profile", "profile again")
    check_names(place)
    frozen = place.trained.frozen

    def trains(s: SegmentPlan) -> bool:
        module = model.modules[s.module]
        return any(module.freeze_groups[p] not in frozen for p in segment_parts(s, module))

    return {
        "n_devices": place.n_devices,
        "global_batch": config.train.global_batch,
        "config": replace(config.plan, node=place.node),
        "memory_bytes": place.plannable_bytes,
        "remat": config.train.remat,
        "zero": "auto" if config.plan.zero == "auto" else int(config.plan.zero),
        "token_multiple": place.token_multiple,
        "trains": trains,
        "allowed": partial(_allowed, place),
    }


def _allowed(place: Workplace, m: SubmeshPlan) -> bool:
    devices = place.devices
    return not devices or can_join(devices[m.first : m.devices.stop])


def check_layers(place: Workplace, profile: Profile, whose: str, remedy: str) -> None:
    """ValueError where a profile is of another model."""
    modules = place.model.modules
    layers = {name: m.n_layers for name, m in modules.items()}
    if profile.model.n_layers != layers:
        raise ValueError(
            f"{whose} is of a model with layers {profile.model.n_layers}, this one has {layers}; "
            f"{remedy}"
        )
    for name, module in modules.items():
        if profile.model.layer_kinds(name) != layer_kinds_of(module):
            raise ValueError(
                f"{whose} is of a model whose layers of {name!r} are of other kinds; {remedy}"
            )


def check_plannable(place: Workplace) -> None:
    """ValueError, before anything is measured, where no plan can be made whatever is measured: the
    policy has no placement, or the model's state alone is more than memory holds."""
    check_names(place)
    modules, config = place.model.modules, with_degrees(place)
    kinds = {name: layer_kinds_of(m) for name, m in modules.items()}
    degrees = {
        name: [d for d in tensor_degrees(place) if divides(m, d)] for name, m in modules.items()
    }
    limits = SpaceLimits.from_model(
        kinds, degrees, edges_of(place.model), place.n_devices, place.node, config
    )
    check_placement_exists(limits, partial(_allowed, place))
    limit, least = place.plannable_bytes, least_bytes(place)
    if limit and least > limit:
        raise ValueError(
            f"no plan fits into {limit / GIB:.2f} GiB per device: parameters, gradients and "
            f"optimizer state, split over all {place.n_devices} devices, need {least / GIB:.2f} "
            "GiB of each; take more devices or more memory, or train less (train.stage, "
            "train.freeze, train.lora_rank)"
        )


def least_bytes(place: Workplace) -> float:
    """Bytes of the model's state on a device, where every bit of it is split over all devices: more
    than that is needed by any plan."""
    tx, n_bytes = make_optimizer(place.config.train), 0.0
    every = parameter_dims(place.model, tx, place.trained.frozen)
    for name, module in place.model.modules.items():
        # Gradients and, where programs read other parameters, masters.
        copies = 2 if working_dtype_of(module).itemsize < FLOAT32_BYTES else 1
        kinds = Counter(layer_kinds_of(module)).items()
        layers = [(every["layer_dims"][layer_key(name, kind)], n) for kind, n in kinds]
        for dims, n in [*layers, (every["ends_dims"][name], 1)]:
            for p in dims:
                trained = p.trains * copies * FLOAT32_BYTES + p.element_state_bytes
                n_bytes += n * prod(p.sizes) * (p.working_bytes + trained)
    return n_bytes / place.n_devices


def check_names(place: Workplace) -> None:
    """ValueError where values are to be kept by name and a module's layers name none."""
    if place.config.train.remat != "named":
        return
    for name, module in place.model.modules.items():
        shape = Shape(1, place.model.piece_tokens.get(name, place.token_multiple))
        every = single_kind_modules(module).values()
        named, least = (
            max(
                residual_bytes(TraceSpec(apart, "layers", shape, remat=remat), 2) for apart in every
            )
            for remat in ("named", "layers")
        )
        if named <= least:
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


def what_would_help(
    place: Workplace, profile: Profile, on_progress: OnProgress | None = None
) -> list[WhatIf]:
    """Return what searches with one thing changed each come to, the present state first."""
    given = _arguments(place, profile)
    # All look as far as the present state does, else less need would look worse.
    given["config"] = with_limits(SearchSpec(**given), profile.model, profile.data.loads).config
    batch, limit = given["global_batch"], given["memory_bytes"]
    sources = list(profile.model.n_layers)[:-1]
    changes: list[tuple[str, dict[str, Any], ModelProfile]] = [("as it is", {}, profile.model)]
    if limit:
        changes.append(("twice the memory", {"memory_bytes": 2 * limit}, profile.model))
    if hardware := profile.model.hardware:
        fast = hardware.with_links(8)
        changes.append(("links 8x", {}, replace(profile.model, hardware=fast)))
    for m in sources:
        changes.append((f"half the work in {m}", {}, _cheaper(profile.model, m)))
    changes.append(("twice the global batch", {"global_batch": 2 * batch}, profile.model))
    changes.append(("twice the devices", {"n_devices": 2 * given["n_devices"]}, profile.model))
    answers = []
    for change, options, model in changes:
        if "n_devices" in options and place.devices:
            options = {**options, "allowed": lambda _: True}
            model = replace(model, concurrency=2 * model.concurrency)
        try:
            best = search_plan(model, profile.data, **{**given, **options}, n_shown=1, refine=False)
            scale = batch / options.get("global_batch", batch)
            answers.append(WhatIf(change, scale * best.candidates[0].makespan_s))
        except ValueError:
            answers.append(WhatIf(change, None))
        if on_progress:
            on_progress(len(answers), len(changes))
    return answers


def _cheaper(profile: ModelProfile, module: str) -> ModelProfile:
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
        why = "a data.factory has its own" if config.data.factory else "train.eval_samples is 0"
        raise ValueError(
            f"data.eval_path={config.data.eval_path} is not evaluated on: {why}; leave it out, or "
            "say how many samples"
        )
    if (share := config.train.eval_fraction) and (config.data.factory or config.data.eval_path):
        by = "data.factory" if config.data.factory else "data.eval_path"
        raise ValueError(
            f"train.eval_fraction={share:g}: {by} says what is held out; leave one of them out"
        )
    last = profiled_steps(config.train.profile_steps).stop
    if last > config.train.steps and not config.train.epochs:  # whose steps the data say
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
