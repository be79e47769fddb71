"""Costs from compiled programs: which models are asked for, and who is told to take them."""

import os

import pytest

from experiments.paper import __main__ as paper
from experiments.paper import common, compiled, dip_models, orch, systems
from experiments.paper.systems import DTYPE, QWEN2_AUDIO

MODELS = {QWEN2_AUDIO.name: systems.model_of(QWEN2_AUDIO)}
MODELS |= {c.name: c.model() for c in (dip_models.CASES[0], orch.CASES[0])}


@pytest.fixture
def asked(monkeypatch):
    """What is compiled, which is as good as done."""
    calls = []
    monkeypatch.setattr(compiled, "profile_at", lambda *args: calls.append(args) or "profile")
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_a_compiling_process_builds_the_model_that_is_asked_for(name, asked):
    model = MODELS[name]
    assert compiled.compiled_profile(model, systems.CLUSTER) == "profile"
    ((config, got, hardware, shapes, degrees, *_),) = asked
    assert got is model
    assert hardware is systems.CLUSTER
    assert config.model.size == name
    assert compiled.build(config.model.size, config.model.dtype) == model
    assert config.plan.hardware == systems.CLUSTER.name
    assert degrees == systems.DEGREES
    assert shapes.keys() == model.modules.keys()
    for m, (small, large) in shapes.items():
        assert small.size * 4 == large.size
        assert small.tokens == large.tokens or m not in model.piece_tokens


def test_every_model_has_a_name_of_its_own():
    names = {c.name for c in (*dip_models.CASES, *orch.CASES)}
    names |= {s.name for s in systems.LLAVA.values()}
    assert len(names) == len(dip_models.CASES) + len(orch.CASES) + len(systems.LLAVA)
    for name in names:
        compiled.build(name, DTYPE)


def _told(job):
    return os.getpid(), systems.costs()


def test_processes_take_costs_from_where_their_parent_does(monkeypatch):
    monkeypatch.setattr(common.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(systems, "_costs", "compiled")
    found = list(common.on_all_cores(_told, [1, 2]))
    assert {costs for _, costs in found} == {"compiled"}
    assert os.getpid() not in {process for process, _ in found}


def test_without_the_compiler_a_line_says_what_is_missing(monkeypatch, tmp_path, capsys):
    def refuse(*_):
        raise ValueError("install dflop_jax[gpu-compile]")

    monkeypatch.setattr(compiled, "profile_at", refuse)
    monkeypatch.setattr(systems, "_costs", "roofline")  # as it is after this test
    command = ["paper", "--out", str(tmp_path), "--only", "throughput", "--costs", "compiled"]
    monkeypatch.setattr("sys.argv", command)
    systems.predicted.cache_clear()
    systems.profile_of.cache_clear()
    assert paper.main() == 2
    assert "error: install dflop_jax[gpu-compile]" in capsys.readouterr().out
