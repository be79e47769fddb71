"""`plan.submeshes` and `plan.loop` against device sets, and what each structure costs."""

import dataclasses

import pytest

from dflop_jax.cli.plan import structure_table
from dflop_jax.plan.dip import rank_submeshes
from dflop_jax.plan.placement import SpaceLimits
from dflop_jax.plan.search import build_evaluator
from dflop_jax.plan.search_spec import SearchSpec
from dflop_jax.plan.space import (
    BASELINES,
    FAMILIES_BY_POLICY,
    allowed_baselines,
    search_families,
)
from dflop_jax.plan.structures import (
    device_seconds,
    padding_fractions,
    structure_costs,
    time_use,
)
from dflop_jax.records import Event, Group, Layout, Schedule, SegmentPlan, Shape, SubmeshPlan, Trace
from tests.plans import bucket, load

from .cases import BATCH, CONFIG, LINKS, data_profile, extent, model_profile, on, run

LAYERS = {"vision": 2, "audio": 2, "llm": 4}
FLAGS = [(s, p) for s in ("any", "separate", "shared") for p in ("any", "require", "never")]


def required(limits, policy, submeshes, loop):
    config = {"policy": policy, "submeshes": submeshes, "loop": loop}
    return dataclasses.replace(limits, config=dataclasses.replace(limits.config, **config))


def every_layout(limits: SpaceLimits) -> list[Layout]:
    """The layouts that a policy searches; none where it raises."""
    try:
        if limits.config.policy in BASELINES:
            return allowed_baselines(limits)
        families = [f for each in search_families(limits).values() for f in each]
        if limits.config.policy == "dip":
            return rank_submeshes(limits)
    except ValueError:
        return []
    return [f.layout(i, limits.n_layers) for f in families for i in range(len(f))]


def structure(layout):
    """(is the LLM alone, does every module have all devices, is there a loop), device by device."""
    where = {m: set() for m in LAYERS}
    for s in layout.segments:
        mesh = layout.submesh(s.submesh)
        where[s.module] |= set(range(mesh.first, mesh.first + mesh.stage * mesh.data * mesh.model))
    alone = not any(d in where[m] for d in where["llm"] for m in ("vision", "audio"))
    everywhere = len(set(map(frozenset, where.values()))) == 1
    return alone, everywhere, any(mesh.stage > 1 for mesh in layout.submeshes)


@pytest.mark.parametrize("submeshes, loop", FLAGS)
@pytest.mark.parametrize("policy", ["auto", *FAMILIES_BY_POLICY, "dip", *BASELINES])
def test_required_structures_are_all_of_theirs(policy, submeshes, loop):
    free = extent(4, LAYERS, max_model=2, max_stage=4)
    got = every_layout(required(free, policy, submeshes, loop))
    found = every_layout(required(free, policy, "any", "any"))
    assert found
    if policy == "dip":  # every rank holds chunks of every module, none in a loop
        assert got == (found if submeshes != "separate" and loop != "require" else [])
        return
    keep = {"any": lambda s: True, "separate": lambda s: s[0], "shared": lambda s: s[1]}[submeshes]
    loops = {"any": (True, False), "require": (True,), "never": (False,)}[loop]
    want = [x for x in found if keep(structure(x)) and structure(x)[2] in loops]
    assert got == want


@pytest.mark.parametrize("policy, n_devices, layers, flags, says", [
    ("orch", 4, LAYERS, ("separate", "any"), "separate: policy orch runs all modules on"),
    ("dip", 4, LAYERS, ("separate", "any"), "separate: policy dip runs all modules on all"),
    ("dip", 4, LAYERS, ("any", "require"), "stages of policy dip are segments without a loop"),
    ("megatron", 4, LAYERS, ("any", "require"), "stages of policy megatron are segments"),
    ("dflop", 4, LAYERS, ("shared", "any"), "policy dflop puts modules on separate devices; use"),
    ("auto", 4, {"llm": 4}, ("separate", "any"), "the model has a single module; omit"),
    ("auto", 1, LAYERS, ("separate", "any"), "needs 2 devices, the plan has 1; raise"),
    ("auto", 2, LAYERS, ("separate", "require"), "needs 3 devices, the plan has 2; raise"),
    ("auto", 1, LAYERS, ("any", "require"), "needs 2 devices, the plan has 1; raise"),
    ("orch", 4, {"vision": 4, "llm": 5}, ("any", "require"), r"\(llm has 5 layers\); change"),
    ("auto", 4, {"vision": 3, "llm": 1}, ("any", "require"), "vision has 3 layers, llm has 1 lay"),
    ("auto", 3, {"vision": 3, "llm": 4}, ("shared", "require"), "has no such placement on 3 dev"),
])  # fmt: skip
def test_structures_that_cannot_be(policy, n_devices, layers, flags, says):
    limits = required(extent(n_devices, layers, max_model=1, max_stage=2), policy, *flags)
    raises = allowed_baselines if policy in BASELINES else search_families
    with pytest.raises(ValueError, match=says):
        (rank_submeshes if policy == "dip" else raises)(limits)


# ---- what they cost ----


PROFILE = on(LINKS, model_profile())


def evaluator(n_devices=3, policy="auto", memory_bytes=0.0):
    config = dataclasses.replace(CONFIG, policy=policy, effort="quick")
    spec = SearchSpec(n_devices, BATCH, config, memory_bytes)
    return build_evaluator(PROFILE, data_profile(), spec)


def test_costs_are_of_the_first_candidate_that_has_the_structure():
    """Whether it was ranked, or takes a search; the chosen plan may have the structure itself."""
    result = run("auto", 3, PROFILE)
    (first,) = run("auto", 3, PROFILE, loop="require", refine=False, n_shown=1).candidates[:1]
    for candidates in ((*result.candidates, first), ()):
        chosen, separate, loop = structure_costs(evaluator(), result.plan, candidates, ())
        assert (chosen.step_s, chosen.extra_s) == (result.plan.predicted.makespan_s, 0.0)
        assert separate == dataclasses.replace(chosen, structure="separate submeshes")
        assert loop.plan == f"{first.policy}: {first.name}"
        assert loop.extra_s == loop.step_s - chosen.step_s > 0
    assert loop.use.bubble > chosen.use.bubble  # what makes it slower


def test_structures_without_a_plan_have_a_reason():
    """A policy that has none, memory into which none fits."""
    chosen = run("auto", 3, PROFILE).plan
    _, separate, loop = structure_costs(evaluator(3, "dip"), chosen, (), ())
    assert separate.use  # the chosen plan's
    assert "stages of policy dip are segments without a loop" in loop.reason
    assert (loop.plan, loop.use) == ("", None)
    costs = structure_costs(evaluator(memory_bytes=1e4), chosen, (), ())
    assert "GiB more a device" in costs[2].reason
    rows = [[*column.cells] for column in structure_table(costs).columns]
    assert rows[0] == ["chosen", "separate submeshes"]  # the reason stands below the table
    assert rows[3] == ["+0.0 ms, +0.0%", "+0.0 ms, +0.0%"]


def test_time_use_by_hand():
    """Half of the tokens are padding; a loop of two stages and four microbatches has five ticks."""
    mesh, loop = SubmeshPlan("v", 0, 1, 2, 1), SubmeshPlan("l", 2, 2, 1, 1)
    parts = (
        SegmentPlan("v", "vision", 0, 2, "v", True, True),
        SegmentPlan("l", "llm", 0, 4, "l", True, True),
    )
    layout = Layout((mesh, loop), parts, (bucket(2, 64),), group_size=4)
    events = (("v", "v", 0, "forward"), ("v → l", "v", 0, "send"), ("l", "l", 1, "backward"),
              ("l", "l", -1, "update"))  # fmt: skip
    trace = Trace(0, "simulated", tuple(Event(*e, i, i + 2.0) for i, e in enumerate(events)))
    seconds = list(device_seconds(layout, trace))
    assert seconds == [("vision", 4.0), ("llm", pytest.approx(4 * 4 / 5)), ("", 4.0)]
    groups = (
        Group("vision", Shape(2, 16), microbatches=4),
        Group("llm", Shape(1, 64), microbatches=4),
    )
    padding = padding_fractions(layout, Schedule(0, groups), [load(3, 64), load(5, 100)])
    assert padding == {"vision": 1 - 8 / 16, "llm": 1 - 164 / 256}


def test_use_of_time_agrees_with_the_prediction():
    plan = run("auto", 3, PROFILE).plan
    use = time_use(evaluator(), plan)
    devices = {m.name: m.n_devices for m in plan.layout.submeshes}
    busy = sum(b * devices[m] for m, b in plan.predicted.busy_fraction.items()) / 3
    assert use.bubble == pytest.approx(1 - busy, abs=0.03)
    assert 0 < use.padding < 1
    assert 0 < use.link_s < plan.predicted.makespan_s
    spec = evaluator().context.spec
    unpriced = build_evaluator(model_profile(), data_profile(), spec)
    assert time_use(unpriced, plan).link_s == 0
