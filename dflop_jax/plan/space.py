"""Which devices and parallelism a plan may give to encoder and LLM: the search space, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TypedDict

from dflop_jax.config import PlanConfig
from dflop_jax.plan.baselines import BASELINES
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.placement import Form, Outline, Placement, encoders_of, factors


def _forms(n_devices: int, n_layers: int, max_model: int, max_stage: int, cut: bool) -> list[Form]:
    """Every form of a module on so many devices. A pipeline of depth s comes as one segment with
    stage=s and, if the module may be `cut`, as s segments."""
    found = []
    for stages in factors(n_devices, min(max_stage, n_layers)):
        for tp in factors(n_devices // stages, max_model):
            data = n_devices // stages // tp
            if n_layers % stages == 0:
                found.append(Form((stages, data, tp)))
            if stages > 1 and cut:
                found.append(Form((1, data, tp), stages))
    return found


def _encoder_forms(
    n_layers: Mapping[str, int], n_devices: int, max_model: int, max_stage: int
) -> list[tuple[Form, ...]]:
    """Forms of the encoders on devices that they share, each with a degree of its own; only a
    single one is a pipeline."""
    names = encoders_of(n_layers)
    if len(names) == 1:
        return [(f,) for f in _forms(n_devices, n_layers[names[0]], max_model, max_stage, True)]
    degrees = product(factors(n_devices, max_model), repeat=len(names))
    return [tuple(Form((1, n_devices // tp, tp)) for tp in tps) for tps in degrees]


def _compatible(outline: Outline) -> bool:
    """Whether a group of microbatches can be one of every segment's."""
    forms = (*outline.encoders, outline.llm)
    return all(outline.group_size % f.mesh[0] == 0 for f in forms)


def separate(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Outline]:
    """DFLOP: encoders and LLM on disjoint devices, each with its own (stage, data, model).

    With head and embedding tied, the LLM stays in one segment. A model without encoder gets all
    devices for the LLM.
    """
    for below in range(1, n_devices) if encoders_of(n_layers) else (0,):
        low = _encoder_forms(n_layers, below, max_model, max_stage) if below else [()]
        high = _forms(n_devices - below, n_layers["llm"], max_model, max_stage, not tied)
        for encoders, llm in product(low, high):
            outline = Outline(encoders, llm, below)
            if _compatible(outline):
                yield outline


def shared(
    n_devices: int,
    n_layers: Mapping[str, int],
    *,
    max_model: int,
    max_stage: int,
    tied: bool,
) -> Iterator[Outline]:
    """OrchMLLM: every module on all devices, each with its own parallelism, one after the other.

    The encoders' items and the LLM's rows are balanced over the ranks separately.
    """
    del tied  # the LLM is one segment anyway
    low = _encoder_forms(n_layers, n_devices, max_model, 1) if encoders_of(n_layers) else [()]
    high = _forms(n_devices, n_layers["llm"], max_model, max_stage, False)
    for encoders, llm in product(low, high):
        yield Outline(encoders, llm, 0)


SPACES = {"dflop": separate, "orch": shared}


def outlines(
    rules: Rules, n_devices: int, config: PlanConfig, tied: bool
) -> dict[str, list[Outline]]:
    """By searched policy, the configured space, as far as the profile has timings of its
    tensor-parallel degrees and these stay inside a node; none for a baseline.

    Raises:
      ValueError: nothing is left.
    """
    wanted = ("dflop", "orch") if config.policy == "auto" else (config.policy,)
    usable = _usable(rules, n_devices)

    def lies_well(o: Outline) -> bool:
        forms = zip(rules.n_layers, (*o.encoders, o.llm), strict=True)
        return all(
            usable(m, 0 if f is not o.llm else o.llm_first, f.n_devices, f.mesh[2])
            for m, f in forms
        )

    limits = _limits(rules, n_devices, config, tied)
    found = {
        p: [o for o in SPACES[p](n_devices, rules.n_layers, **limits) if lies_well(o)]
        for p in wanted
        if p in SPACES
    }
    if found and not any(found.values()):
        raise ValueError(_none(config, n_devices))
    return found


def baseline(rules: Rules, n_devices: int, config: PlanConfig, tied: bool) -> list[Placement]:
    """Placements of a baseline policy, as far as `outlines` would take them; none for others.

    Raises:
      ValueError: nothing is left.
    """
    if config.policy not in BASELINES:
        return []
    usable = _usable(rules, n_devices)

    def lies_well(p: Placement) -> bool:
        segments = ((s.module, p.mesh_of(s)) for s in p.segments)
        return all(usable(module, m.first, m.n_devices, m.model) for module, m in segments)

    space = BASELINES[config.policy]
    limits = _limits(rules, n_devices, config, tied)
    found = [p for p in space(n_devices, rules.n_layers, **limits) if lies_well(p)]
    if not found:
        raise ValueError(_none(config, n_devices))
    return found


class _Limits(TypedDict):
    max_model: int
    max_stage: int
    tied: bool


def _limits(rules: Rules, n_devices: int, config: PlanConfig, tied: bool) -> _Limits:
    node = rules.hardware.devices_per_node if rules.hardware else n_devices
    return {"max_model": min(config.max_model, node), "max_stage": config.max_stage, "tied": tied}


def _usable(rules: Rules, n_devices: int) -> Callable[[str, int, int, int], bool]:
    """Whether a module may lie on so many devices from the first on, in this tensor-parallel
    degree: it is timed and each group of its devices lies in one node."""
    timed = {(t.module, t.model) for t in rules.costs.profile.timings}
    node = rules.hardware.devices_per_node if rules.hardware else n_devices

    def usable(module: str, first: int, n: int, tp: int) -> bool:
        inside = (first % tp == 0 and node % tp == 0) or all(
            d % node + tp <= node for d in range(first, first + n, tp)
        )
        return inside and (module, tp) in timed

    return usable


def _none(config: PlanConfig, n_devices: int) -> str:
    return (
        f"policy {config.policy} has no placement on {n_devices} devices: separate encoder and LLM "
        "submeshes need two; raise plan.devices or use plan.policy auto"
    )
