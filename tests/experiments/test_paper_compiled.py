"""Costs from compiled programs: which models are asked for, and who is told to take them."""

import uuid

import pytest

from experiments.paper import __main__ as paper
from experiments.paper import answers, compiled, costs, dip_models, orch
from experiments.paper.systems import QWEN2_AUDIO

CASES = {c.name: c for c in (QWEN2_AUDIO, dip_models.CASES[0], orch.CASES[0])}


@pytest.fixture
def asked(monkeypatch):
    """What is compiled, which is as good as done."""
    calls = []
    monkeypatch.setattr(costs, "profile_at", lambda *args: calls.append(args) or "profile")
    return calls


@pytest.mark.parametrize("name", CASES)
def test_a_compiling_process_builds_the_model_that_is_asked_for(name, asked):
    case, model = CASES[name], CASES[name].model()
    assert costs._compiled(name, model, case.hardware) == "profile"
    ((config, got, hardware, shapes, degrees, *_),) = asked
    assert got is model
    assert hardware is case.hardware
    assert config.model.factory == f"{compiled.__name__}:{compiled.build.__name__}"
    assert compiled.build(config.model.size, config.model.dtype) == model
    assert config.plan.hardware == case.hardware.name
    assert degrees == costs.DEGREES
    assert shapes.keys() == model.modules.keys()
    for m, (small, large) in shapes.items():
        assert small.size * 4 == large.size
        assert small.tokens == large.tokens or m not in model.piece_tokens


def _fail(folder):
    (folder / uuid.uuid4().hex).touch()
    raise OSError("no room")


@pytest.mark.slow
def test_a_job_that_fails_ends_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(answers.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    with pytest.raises(OSError, match="no room"):
        list(answers.on_all_cores(_fail, [tmp_path] * 2_000))
    assert len(list(tmp_path.iterdir())) < 2_000


def test_without_the_compiler_a_line_says_what_is_missing(monkeypatch, tmp_path, capsys):
    def refuse(*_):
        raise ValueError("install dflop_jax[gpu-compile]")

    monkeypatch.setattr(costs, "profile_at", refuse)
    monkeypatch.setattr(costs, "_costs", "roofline")  # as it is after this test
    command = ["paper", "--out", str(tmp_path), "--only", "throughput", "--costs", "compiled"]
    monkeypatch.setattr("sys.argv", command)
    costs._cost_model.cache_clear()
    assert paper.main() == 2
    assert "error: install dflop_jax[gpu-compile]" in capsys.readouterr().out
