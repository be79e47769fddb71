"""Profiles from compiled layers: programs of other depths and shapes take what is predicted."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import pytest

from dflop_jax.aot import chip_profile, compiling
from dflop_jax.aot.worker import CompiledProgram, Probe, ProbeResult, compile_probe
from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.kernels import Efficiency, Kernel, Kind
from dflop_jax.records import BACKWARD, FORWARD, DataProfile, Load, MeshShape, SegmentPlan, Shape
from dflop_jax.train.run_context import build_model, make_run_context
from tests.plans import group_s, segment_bytes

from .conftest import fake_compiler

H100 = find_hardware("h100")
MODEL = build_model(ModelConfig(size="nano", dtype="bfloat16"))
SHAPES = {"vision": [Shape(4, 16), Shape(16, 16)], "llm": [Shape(1, 256), Shape(1, 1024)]}


def config(tmp_path, **train) -> Config:
    return Config(
        model=ModelConfig(size="nano", dtype="bfloat16"),
        plan=PlanConfig(policy="dflop", hardware="h100", devices=8),
        train=TrainConfig(**train),
        cache_dir=str(tmp_path),
    )


# ---- what a made-up compiler would say ----

AGAIN = {"none": 0.0, "dots": 0.2, "named": 0.5, "layers": 1.0}


def work_s(probe: Probe, kind: str) -> float:
    """Seconds of the made-up programs: linear in depth and size."""
    size = probe.shape.size / probe.tp
    layer = size * {FORWARD: 1.0, BACKWARD: 2.0 + AGAIN[probe.remat]}[kind]
    return 1e-6 * (probe.depth * layer + 3 * size * probe.ends)


def residuals(probe: Probe) -> float:
    each = (1 - 0.5 * AGAIN[probe.remat]) * 1000.0 * probe.shape.size
    return each * (probe.depth + 0.5 * (probe.module == "vision"))


def program(seconds: float, work_bytes: float) -> CompiledProgram:
    n_bytes = (seconds - Efficiency().launch_s) * Efficiency().bandwidth * H100.memory_bandwidth
    return CompiledProgram((Kernel(Kind.ELEMENTWISE, 0.0, n_bytes),), work_bytes)


def made_up(probe: Probe) -> ProbeResult:
    ahead, back = (work_s(probe, kind) for kind in (FORWARD, BACKWARD))
    temp = 300.0 * probe.shape.size + 1e6 + 10.0 * probe.depth * (probe.module == "vision")
    hidden = 64.0 * probe.shape.size
    kept = residuals(probe)
    if probe.module == "llm" and probe.ends:  # one task, with the loss's own temporaries
        work = temp + kept + 2 * hidden + 500.0 * probe.shape.size + 2e6
        return ProbeResult(program(ahead + back, work), None, 0.0, hidden)
    return ProbeResult(
        program(back, temp), program(ahead, 0.0) if probe.forward else None, kept, hidden
    )


def profile(tmp_path, monkeypatch, answer=made_up, degrees=(1, 2), **train):
    requested: list[Probe] = []

    def answers(config, model, probes, on_progress):
        requested.extend(probes)
        return {p: answer(p) for p in probes}

    monkeypatch.setattr(chip_profile, "compile_probes", answers)
    result = chip_profile.compile_profile(
        config(tmp_path, **train), MODEL, H100, SHAPES, degrees, 8
    )
    return result, requested


@pytest.mark.slow
@pytest.mark.parametrize("remat", AGAIN)
@pytest.mark.parametrize("tp", [1, 2])
def test_prices_of_other_depths_and_shapes_match_their_programs(tmp_path, monkeypatch, remat, tp):
    """Encoders hand over, so every figure of theirs is the compiler's own."""
    costs = CostModel(profile(tmp_path, monkeypatch)[0])
    whole = SegmentPlan("vision", "vision", 0, 27, "m", True, True, remat, unrolled=True)
    probe, mesh = Probe("vision", tp, Shape(9, 16), 27, remat), MeshShape(model=tp)
    for kind in (FORWARD, BACKWARD):
        got = group_s(costs, whole, mesh, 1, 9, 16, kind)
        assert got - Efficiency().task_s == pytest.approx(work_s(probe, kind), rel=1e-4)
    needs, want = segment_bytes(costs, whole, mesh, 1, 9, 16, trained=False), made_up(probe)
    assert needs.temporaries == pytest.approx(want.backward.work_bytes, rel=1e-4)
    assert needs.residuals == pytest.approx(residuals(probe) + want.hidden_bytes, rel=1e-4)


@pytest.mark.parametrize("remat", AGAIN)
def test_task_with_loss_costs_what_its_program_takes(tmp_path, monkeypatch, remat):
    costs = CostModel(profile(tmp_path, monkeypatch, degrees=(1,))[0])
    whole = SegmentPlan("llm", "llm", 0, 28, "m", True, True, remat, unrolled=True)
    probe = Probe("llm", 1, Shape(1, 640), 28, remat)
    got = group_s(costs, whole, MeshShape(), 1, 1, 640, BACKWARD)
    both = sum(work_s(probe, kind) for kind in (FORWARD, BACKWARD))
    assert got - Efficiency().task_s == pytest.approx(both, rel=1e-4)
    needs = segment_bytes(costs, whole, MeshShape(), 1, 1, 640, trained=False)
    assert needs.temporaries == pytest.approx(made_up(probe).backward.work_bytes, rel=1e-4)
    assert needs.residuals == pytest.approx(64.0 * 640)


def test_only_requested_policies_are_compiled(tmp_path, monkeypatch):
    every = profile(tmp_path, monkeypatch)[1]
    assert len(every) == len(set(every)) == 2 * 2 * 4 * (2 + 3)
    assert {p.remat for p in profile(tmp_path, monkeypatch, remat="dots")[1]} == {"none", "dots"}
    known, probes = profile(tmp_path, monkeypatch, remat="segment", degrees=(1,))
    assert {(p.remat, p.tp) for p in probes} == {("none", 1)}
    assert CostModel(known).priced_policies("llm") == ("none", "segment")


def test_degrees_that_do_not_compile_are_left_out(tmp_path, monkeypatch):
    def answer(probe):
        return ProbeResult(error="no tile fits") if probe.tp == 2 else made_up(probe)

    result = profile(tmp_path, monkeypatch, answer)[0]
    assert {t.model for t in result.timings} == {1}
    with pytest.raises(ValueError, match="vision cannot be compiled for h100: no tile fits"):
        profile(tmp_path, monkeypatch, lambda p: ProbeResult(error="no tile fits"))


def test_shapes_are_powers_of_two_around_the_data():
    data = DataProfile("d", 2, tuple(Load({"vision": (16,) * n, "llm": (300,)}) for n in (1, 5)))
    assert {m: chip_profile._probe_shapes(data, m, MODEL, 128) for m in MODEL.modules} == SHAPES


def test_frozen_parameters_have_no_state(tmp_path, monkeypatch):
    """With adapters few of an LLM's parameters train; others have no moments and no gradient."""
    made = config(tmp_path, lora_rank=2, global_batch=4)
    context = make_run_context(replace(made, plan=replace(made.plan, devices=1)))
    source = context.source()
    monkeypatch.setattr(chip_profile, "compiler_environment", dict)
    monkeypatch.setattr(
        chip_profile,
        "compile_probes",
        lambda _, model, probes, tick: {p: made_up(p) for p in probes},
    )
    found = chip_profile.predict_profile(context, source, lambda *_: None, pytest.fail).model
    assert found.priced_by == "programs compiled for h100"
    sizes = {
        t: sum(prod(p.sizes) for p in found.layer_dims["llm"] if p.trains == t) for t in (0, 1)
    }
    assert 0 < sizes[1] < sizes[0]
    assert all(p.trains == (p.element_state_bytes > 0) for p in found.layer_dims["llm"])


# ---- one probe, by the compiler of this machine ----


def test_compiled_probe_has_kernels_and_residual_bytes():
    probe = Probe("vision", 1, Shape(2, 16), 2, "none", forward=True)
    result = compile_probe(MODEL, probe, jax.devices())
    assert not result.error
    assert result.backward.kernels
    assert result.forward.kernels
    assert result.residual_bytes > result.hidden_bytes == 2 * 16 * 2 * MODEL.size.vision.width
    bad = compile_probe(MODEL, replace(probe, tp=3), jax.devices())
    assert "does not divide" in bad.error


# ---- processes, and what they leave on disk ----

FAKE = """
import os, sys, msgspec
sys.path[:0] = PATHS
from dflop_jax.aot.worker import ProbeResult, Request
for line in sys.stdin.buffer:
    probe = msgspec.json.decode(line, type=Request).probe
    if probe.depth == 3:
        os.write(2, b"no tile fits\\n")
        os.abort()
    os.write(1, msgspec.json.encode(ProbeResult(residual_bytes=float(probe.depth))) + b"\\n")
"""


@pytest.mark.slow
def test_probe_results_are_cached_unless_the_compiler_died(tmp_path, monkeypatch):
    fake_compiler(monkeypatch, FAKE)
    probes = [Probe("llm", 1, Shape(1, 128), d, "none") for d in (1, 2, 3, 4)]
    ticks = []
    result = compiling.compile_probes(config(tmp_path), MODEL, probes, lambda *n: ticks.append(n))
    assert [result[p].residual_bytes for p in probes] == [1.0, 2.0, 0.0, 4.0]
    assert result[probes[2]].error == "the compiler died (signal 6): no tile fits"
    assert sorted(ticks) == [(n, 4) for n in (1, 2, 3, 4)]
    fake_compiler(monkeypatch, "import sys; sys.exit('no disk left')")
    again = compiling.compile_probes(config(tmp_path), MODEL, probes)
    assert again.pop(probes[2]).error.endswith("no disk left")  # a death is tried again
    assert again == {p: result[p] for p in probes if p.depth != 3}
    plan = PlanConfig(policy="dflop", hardware="a100-80", devices=8)
    other = replace(config(tmp_path), plan=plan)
    assert all(f.error for f in compiling.compile_probes(other, MODEL, probes).values())
