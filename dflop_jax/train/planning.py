"""From a workplace and its profile to the plan, and to what could be better."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.config import Config, profiled_steps
from dflop_jax.contract import SAVED_NAMES
from dflop_jax.hardware import PLANNED_SHARE, hardware_like
from dflop_jax.pipeline.layout import can_join
from dflop_jax.pipeline.segment import parts_of
from dflop_jax.plan import search
from dflop_jax.plan.explain import Saving
from dflop_jax.plan.search import SearchResult, SearchSpec, search_plan
from dflop_jax.profile.memory import kept_bytes
from dflop_jax.records import (
    ModelProfile,
    Plan,
    Profile,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import OnProgress

SHOWN = 10  # placements that an explanation compares


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
    return search.what_memory_bought(plan, profile.model, profile.data, spec)


def _arguments(place: Workplace, profile: Profile) -> dict[str, Any]:
    config, model, devices = place.config, place.model, place.devices
    layers = {name: m.n_layers for name, m in model.modules.items()}
    if profile.model.n_layers != layers:
        raise ValueError(
            f"the profile is of a model with layers {profile.model.n_layers}, this one has "
            f"{layers}; profile again"
        )
    _check_names(place)
    frozen = place.trained.frozen

    def trains(s: SegmentPlan) -> bool:
        module = model.modules[s.module]
        return any(module.freeze_groups[p] not in frozen for p in parts_of(s, module))

    def allowed(m: SubmeshPlan) -> bool:
        return not devices or can_join(devices[m.first : m.devices.stop])

    node = config.plan.node
    if devices and not node:
        node = hardware_like(devices[0].device_kind).devices_per_node
    return {
        "n_devices": place.n_devices,
        "global_batch": config.train.global_batch,
        "config": replace(config.plan, node=node),
        "memory_bytes": memory_bytes(place),
        "hardware": place.hardware,
        "remat": config.train.remat,
        "zero": "auto" if config.plan.zero == "auto" else int(config.plan.zero),
        "token_multiple": place.token_multiple,
        "trains": trains,
        "allowed": allowed,
    }


def _check_names(place: Workplace) -> None:
    """ValueError where values are to be kept by name and a module's layers name none."""
    if place.config.train.remat != "named":
        return
    for name, module in place.model.modules.items():
        shape = Shape(1, place.model.piece_tokens.get(name, place.token_multiple))
        kept = [kept_bytes(module, shape, 1, remat)[0] for remat in ("named", "layers")]
        if kept[0] <= kept[1]:
            raise ValueError(
                f"train.remat=named: the layers of {name!r} name no value to keep; take layers or "
                f"dots, or have them name one ({', '.join(SAVED_NAMES)})"
            )


def memory_bytes(place: Workplace) -> float:
    """Bytes of a device that a plan may fill; 0 where nobody says (CPU)."""
    if stated := place.config.plan.memory_bytes:
        return stated
    if place.hardware:
        return place.hardware.plannable_bytes
    stats = place.devices[0].memory_stats() or {}
    return PLANNED_SHARE * stats.get("bytes_limit", 0)


@dataclass(frozen=True)
class WhatIf:
    """A change, and the seconds that the best placement then takes for a global batch of as many
    samples as before, with one bucket; None: nothing fits."""

    change: str
    makespan_s: float | None


def what_would_help(place: Workplace, profile: Profile) -> list[WhatIf]:
    """Return what searches with one thing changed each come to, the present state first."""
    given = _arguments(place, profile)
    batch, limit = given["global_batch"], given["memory_bytes"]
    sources = list(profile.model.n_layers)[:-1]
    changes: list[tuple[str, dict[str, Any], ModelProfile]] = [("as it is", {}, profile.model)]
    if limit:
        changes.append(("twice the memory", {"memory_bytes": 2 * limit}, profile.model))
    if hardware := given["hardware"]:
        fast = replace(
            hardware,
            link_bandwidth=8 * hardware.link_bandwidth,
            network_bandwidth=8 * hardware.network_bandwidth,
        )
        changes.append(("links between submeshes 8x", {"hardware": fast}, profile.model))
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
            best = search_plan(model, profile.data, **{**given, **options}, shown=1, refine=False)
            scale = batch / options.get("global_batch", batch)
            answers.append(WhatIf(change, scale * best.candidates[0].makespan_s))
        except ValueError:
            answers.append(WhatIf(change, None))
    return answers


def _cheaper(profile: ModelProfile, module: str) -> ModelProfile:
    """Return the profile with half the seconds in a module."""
    timings = tuple(t.scaled(0.5) if t.module == module else t for t in profile.timings)
    return replace(profile, timings=timings)


def check_trainable(config: Config) -> None:
    """ValueError where a configuration only plans, is to trace steps that it does not have, or to
    change plans without checkpoints."""
    if config.plan.hardware:
        raise ValueError(
            f"plan.hardware={config.plan.hardware} plans for devices that are not here; leave it "
            "empty to train"
        )
    if config.plan.redecide_every and not config.checkpoint.every:
        raise ValueError(
            f"plan.redecide_every={config.plan.redecide_every} changes plans through a checkpoint, "
            "and checkpoint.every=0 writes none; give it a number of steps"
        )
    if profiled_steps(config.train).stop > config.train.steps:
        raise ValueError(
            f"train.profile_steps={config.train.profile_steps}, but with train.steps="
            f"{config.train.steps} the last step is number {config.train.steps - 1}; choose "
            "earlier ones"
        )
