"""Which parts train in a stage: what is compiled, what runs, what changes."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from dflop_jax.config import Config, TrainConfig
from dflop_jax.records import BACKWARD, Plan, SegmentPlan, SubmeshPlan
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.module_parts import module_structs
from dflop_jax.train.choose_plan import describe_context
from dflop_jax.train.optimizer import (
    TrainedParts,
    configure_model,
    find_trained_parts,
    make_optimizer,
)
from dflop_jax.train.run_context import make_run_context
from dflop_jax.train.trainer import Trainer
from models import llava, qwen2_audio
from tests.checkpoint.checkpoint_cases import model

from ..plans import nano_profile
from ..runtime import plain
from .resume_cases import CONFIG, NANO_MODEL, PLAN, evaluations

STAGES = {"connector": {"vision": {"exit"}}, "llm": {"llm": {"entry", "layers", "exit"}}}


def split_plan() -> Plan:
    """The tower in two segments, so that the first has nothing of the connector; the LLM too."""
    base = plain.plan_of(model(), (0, 1, 1, 1), (4, 1, 1, 1), llm_segments=2)
    tower = [
        SegmentPlan("v0", "vision", 0, 1, "v0", True, False),
        SegmentPlan("v1", "vision", 1, 2, "v1", False, True),
    ]
    return base.with_layout(
        submeshes=(
            SubmeshPlan("v0", 0, 1, 1, 1),
            SubmeshPlan("v1", 1, 1, 1, 1),
            *base.layout.submeshes[1:],
        ),
        segments=(*tower, *base.layout.segments[1:]),
    )


def run_stage(stage: str):
    """(parameters before, after, compiled backward programs, tasks that ran) of two steps."""
    train = TrainConfig(steps=20, warmup_steps=0, learning_rate=1e-2, stage=stage)
    m, plan = model(), split_plan()
    frozen = find_trained_parts(train, m).frozen
    ex = Executor(m, plan, make_optimizer(train), clip_norm=1.0, freeze=frozen)
    try:
        ex.init(0)
        before = plain.join(plan, ex.state.params)
        ex.compile()
        compiled = {k[0] for k in ex.programs.compiled if k[-1] == BACKWARD}
        samples = plain.random_samples(m, 6, 0)
        schedule = plain.random_schedule(plan, samples, 1, 0)
        step = schedule, plain.pack(m, plan, schedule, samples), {"llm": 1.0}
        traces = [ex.run_step(*step).result().trace for _ in range(2)]
        ran = {(e.segment, e.direction) for trace in traces for e in trace.events}
        return before, plain.join(plan, ex.state.params), compiled, ran, ex
    finally:
        ex.close()


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("stage", STAGES)
def test_only_a_stages_parts_change_and_frozen_segments_run_no_backward(stage):
    before, after, compiled, ran, ex = run_stage(stage)
    for module, parts in before.items():
        for part, tree in parts.items():
            same = jax.tree.leaves(jax.tree.map(np.array_equal, tree, after[module][part]))
            trains = part in STAGES[stage].get(module, ())
            # The tower's key bias has no gradient in exact arithmetic, so it may stay.
            assert sum(same) <= 1 if trains else all(same), (module, part)
    # The LLM passes the connector's gradient through; nothing below the connector has one.
    backward = {"connector": {"v1", "llm0", "llm1"}, "llm": {"llm0", "llm1"}}[stage]
    updated = {"connector": {"v1"}, "llm": {"llm0", "llm1"}}[stage]
    assert compiled == backward
    assert {s for s, d in ran if d == BACKWARD} == backward
    for kind in ("reduce", "update"):
        assert {s for s, d in ran if d == kind} == updated
    assert set(ex.state.grads) == set(ex.state.opt_state) == updated
    if stage == "connector":  # the tower's last layer, in the same segment, holds nothing
        assert set(ex.state.grads["v1"]) == set(ex.state.opt_state["v1"][0].mu) == {"exit"}
    exchanged = {k[0] for k in ex.programs.compiled if k[-1] is True}
    assert exchanged == (set() if stage == "llm" else {"v1"})


# ---- what a configuration means ----


def parts(m=None, **train) -> TrainedParts:
    config = TrainConfig(**({"learning_rate": 1e-3} | train))
    return find_trained_parts(config, configure_model(m or llava.build("nano"), config))


def test_the_start_line_counts_trained_and_frozen_parameters_by_part():
    train = TrainConfig(lora_rank=2)
    place = make_run_context(dataclasses.replace(CONFIG, model=NANO_MODEL, train=train))
    counts: dict[str, int] = {}
    for module in place.model.modules.values():
        for part, tree in module_structs(module).items():
            n = sum(leaf.size for leaf in jax.tree.leaves(tree))
            group = module.freeze_groups[part]
            counts[group] = counts.get(group, 0) + n
    frozen = ", ".join(f"{g} {counts[g]:,}" for g in ("vision", "connector", "llm"))
    says = f"; parameters: trained lora {counts['lora']:,}; frozen {frozen}"
    assert describe_context(place).endswith(says)


def test_stages_are_shorthands_for_what_is_frozen():
    assert parts() == TrainedParts((), {"vision": 1e-3, "connector": 1e-3, "llm": 1e-3})
    assert parts(stage="connector") == TrainedParts(("vision", "llm"), {"connector": 1e-3})
    assert parts(stage="llm") == TrainedParts(("vision", "connector"), {"llm": 1e-3})
    assert parts(freeze=("vision",)).frozen == ("vision",)
    # Saying again what the stage says is no contradiction.
    assert parts(stage="connector", freeze=("llm",)) == parts(stage="connector")
    audio = qwen2_audio.build("qwen2-audio-nano")
    assert parts(audio, stage="connector").frozen == ("audio", "llm")


def test_each_part_has_a_rate():
    got = parts(learning_rates=("vision=2e-6", "connector = 1e-5")).rates
    assert got == {"vision": 2e-6, "connector": 1e-5, "llm": 1e-3}
    lora = parts(lora_rank=2, learning_rates=("lora=1e-4",))
    assert lora == TrainedParts(("vision", "connector", "llm"), {"lora": 1e-4})
    more = parts(lora_rank=2, learning_rates=("connector=1e-5",))
    assert more == TrainedParts(("vision", "llm"), {"connector": 1e-5, "lora": 1e-3})
    assert parts(lora_rank=2, stage="llm").rates == {"lora": 1e-3}
    assert parts(lora_rank=2, stage="llm", freeze=("llm",)).rates == {"lora": 1e-3}
    tower = parts(lora_rank=2, lora_targets=("llm", "vision.*"), lora_ranks=("vision=1",))
    assert tower == TrainedParts(("vision", "connector", "llm"), {"lora": 1e-3})
    connector = parts(lora_rank=2, lora_targets=("connector",), stage="connector")
    assert connector == TrainedParts(("vision", "connector", "llm"), {"lora": 1e-3})


@pytest.mark.parametrize(
    "train, says",
    [
        ({"stage": "connector", "freeze": ("connector",)}, "names 'connector', which train.stage"),
        ({"stage": "llm", "freeze": ("llm", "vision")}, "freeze names 'llm', which train.stage=ll"),
        ({"stage": "connector", "freeze": ("audio",)}, "cannot freeze ['audio']; the model has"),
        ({"freeze": ("vision", "connector", "llm")}, "nothing is left to train"),
        ({"freeze": ("lora",)}, "cannot freeze ['lora']"),
        ({"lora_rank": 2, "freeze": ("lora",)}, "names 'lora', which train.lora_rank trains"),
        ({"lora_rank": 2, "stage": "connector"}, "'llm', which train.stage=connector freezes; set"),
        ({"lora_rank": 2, "lora_targets": ("llm", "vision"), "stage": "llm"}, "adapts 'vision', w"),
        ({"lora_rank": 2, "lora_targets": ("q_proj",)}, "'q_proj' matches no matrix"),
        ({"lora_targets": ("vision",)}, "train.lora_rank=0 turns off; set a rank"),
        ({"lora_dropout": 0.1}, "train.lora_rank=0 turns off; set a rank"),
        ({"lora_alpha": 8.0}, "train.lora_rank=0 turns off; set a rank, or omit lora_alpha"),
        ({"learning_rates": ("audio=1e-5",)}, "'audio', which the model does not have; trained"),
        (
            {"learning_rates": ("vision=1e-5",), "freeze": ("vision",)},
            "names 'vision', which is frozen; trained parts: connector, llm",
        ),
        ({"learning_rates": ("llm=1e-5",), "lora_rank": 2}, "'llm', which is frozen; trained "),
    ],
)
def test_contradictions_are_one_line(train, says):
    with pytest.raises(ValueError, match=r".") as failed:
        parts(**train)
    assert says in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_model_without_a_connector_or_adapters_says_so():
    modules = {"llm": llava.build("nano").modules["llm"]}
    text_only = types.SimpleNamespace(modules=modules)
    with pytest.raises(ValueError, match=r"no part of that name, only llm; freeze the other parts"):
        parts(text_only, stage="connector")
    with pytest.raises(ValueError, match=r"train.lora_rank=2, but a SimpleNamespace has no with_l"):
        parts(text_only, lora_rank=2)
    assert parts(text_only, stage="llm").frozen == ()


# ---- whole runs ----


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "train",
    [
        {"stage": "connector", "learning_rates": ("connector=3e-3",)},
        {"lora_rank": 4, "learning_rates": ("lora=1e-2", "vision=1e-4")},
        {"lora_rank": 4, "stage": "llm", "remat": "dots"},
    ],
    ids=["connector", "lora", "lora alone"],
)
def test_a_run_trains_and_evaluates(train, tmp_path, monkeypatch):
    monkeypatch.setattr("dflop_jax.train.trainer.write_summary", lambda folder: None)
    steps = dataclasses.replace(CONFIG.train, steps=4, eval_every=2, learning_rate=1e-3, **train)
    config = Config(model=NANO_MODEL, data=CONFIG.data, train=steps, run_dir=str(tmp_path / "r"))
    trainer = Trainer(config, plan=PLAN, profile=nano_profile())
    result = trainer.fit()
    assert np.isfinite(result.losses).all()
    assert result.compiles_after_warmup == 0
    rates = trainer.context.trained.rates
    rows = read_metrics(config.run_dir)
    for row in rows:
        assert set(row["learning_rates"]) == set(rates)
        for name, rate in rates.items():
            want = row["learning_rate"] * rate / 1e-3
            assert row["learning_rates"][name] == pytest.approx(want)
    found = evaluations(config.run_dir)
    assert [e["step"] for e in found] == [2, 4]
    assert found[0]["loss"] != found[1]["loss"]
    assert result.evaluation is not None
