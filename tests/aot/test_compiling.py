"""The process that compiles, its death, what stands in the way of it, and whether programs fit."""

from __future__ import annotations

import importlib.util
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.aot import chips, reports
from dflop_jax.aot.chips import CHIPS, target_config
from dflop_jax.aot.compiling import Compiler, compile_plan
from dflop_jax.aot.reports import CompileReport, ProgramReport, SegmentMemory, device_memory
from dflop_jax.aot.worker import compile_program, error_line
from dflop_jax.cli import main
from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.hardware import GIB, find_hardware
from dflop_jax.records import SubmeshPlan
from dflop_jax.records.files import load, save
from tests.plans import NANO, bucket

from .conftest import fake_compiler


def config(**plan) -> Config:
    return Config(
        model=ModelConfig(size="nano", dtype="bfloat16", attention_kernel="xla"),
        plan=PlanConfig(policy="dflop", hardware="h100", devices=NANO.layout.n_devices, **plan),
    )


def has_compiler() -> bool:
    try:
        chips.compiler_environment()
    except ValueError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs the extra gpu-compile")


@pytest.fixture
def experiment(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(
        "from dflop_jax import Config, ModelConfig, PlanConfig\n"
        "def config():\n"
        "    model = ModelConfig(size='nano', dtype='bfloat16', attention_kernel='xla')\n"
        f"    plan = PlanConfig(policy='dflop', devices={NANO.layout.n_devices})\n"
        "    return Config(model=model, plan=plan)\n"
    )
    save(NANO.with_layout(buckets=NANO.layout.buckets[:1]), "plan.json")
    return "nano.py"


# ---- what stands in the way ----


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--plan.hardware a100-40|a100-80|h100|h200"),
        (["--plan.hardware", "b200"], "known: a100-40, a100-80, h100, h200"),
        (["--plan.hardware", "h100"], "pip install -e '.[gpu-compile]'"),
    ],
)
def test_compile_without_a_chip_or_a_compiler_is_refused(
    experiment, capsys, monkeypatch, args, message
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    assert main(["compile", experiment, *args]) == 2
    text = capsys.readouterr().err.strip()
    assert message in text
    assert "\n" not in text


def test_compiler_environment_needs_ptxas(monkeypatch, tmp_path):
    plugin = {"jax_plugins.xla_cuda13": object()}
    monkeypatch.setattr(importlib.util, "find_spec", plugin.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs ptxas"):
        chips.compiler_environment()
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text("")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(ptxas.parent))
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    environment = chips.compiler_environment()
    assert environment["XLA_FLAGS"].startswith(f"--xla_gpu_cuda_data_dir={tmp_path} ")
    assert environment["XLA_FLAGS"].endswith("--xla_mine=1")
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_target_config_has_the_chips_of_the_hardware_table():
    for name, chip in CHIPS.items():
        text = target_config(chip, find_hardware(name))
        assert text.count("{") == text.count("}")
        assert f"device_memory_size: {find_hardware(name).memory_bytes:.0f}\n" in text


# ---- memory ----


def state(segment, resource, *, state=4.0, inputs=0.5, remat="none") -> SegmentMemory:
    gib = [n * GIB for n in (state, inputs, 1.0)]
    return SegmentMemory(segment, segment, resource, gib[0], gib[1], 2, gib[2], remat)


def program(segment, kind, temp, out=0.0, alias=0.0, handed=0.0, **more) -> ProgramReport:
    return ProgramReport(
        f"{segment} {kind}", segment, segment, kind, (1, 1, 1), temp_bytes=temp * GIB,
        output_bytes=out * GIB, aliased_bytes=alias * GIB, handed_bytes=handed * GIB, **more,
    )  # fmt: skip


def described(states, programs, gib, chip="h100", peaks=None):
    memory = device_memory(states, programs, peaks or {})
    return reports.describe_fit(chip, gib * GIB, memory, programs, states)


def test_the_peak_is_state_inputs_and_the_largest_program():
    states = [state("a", 0), state("b", 1, state=8.0, inputs=0.25)]
    programs = [
        program("a", "forward", 1.0, out=0.75, handed=0.5),
        program("a", "backward", 6.0, out=3.0, alias=2.0),
        program("b", "backward", 2.0),
    ]
    a, b = device_memory(states, programs, {})
    assert a.peak_bytes == (4 + 2 * (0.5 + 0.5) + 7.0) * GIB
    assert a.program == "a backward"
    assert b.peak_bytes == (8 + 2 * 0.25 + 2.0) * GIB


@pytest.mark.parametrize("kind, work", [("update", 2.0 + 2.0), ("reduce", 2.0 + 2.0)])
def test_step_end_has_reduced_gradients_of_all_segments(kind, work):
    states = [state("a", 0), state("b", 0)]
    # What a reduction gives are its gradients' shards and the zeroed gradients.
    out = 1.0 + 3.0 if kind == "reduce" else 3.0
    (both,) = device_memory(states, [program("a", kind, 2.0, out=out, alias=3.0)], {})
    assert both.work_bytes == work * GIB


def test_verdict_of_a_fitting_plan_has_spare_bytes():
    states, programs = [state("a", 0)], [program("a", "backward", 3.0)]
    fits, words = described(states, programs, 10)
    assert fits
    assert "8.0 of 10.0 GiB on a" in words
    assert "2.0 GiB to spare" in words
    assert "planned" not in words
    _, words = described(states, programs, 10, peaks={"a": 7.0 * GIB, "b": 9.0 * GIB})
    assert "3.0 a backward; planned 7.0" in words


@pytest.mark.parametrize("sizes, remat, temp, helps", [
    ({}, "none", 30.0, "train.remat layers, smaller rows"),
    ({}, "layers", 30.0, "GiB too much; smaller rows"),
    ({"state": 40.0}, "none", 3.0, "plan.zero 3, a larger tensor degree (plan.max_model), more"),
])  # fmt: skip
def test_verdict_of_a_too_large_plan_has_program_and_remedy(sizes, remat, temp, helps):
    states = [state("b", 1), state("a", 0, remat=remat, **sizes)]
    programs = [program("a", "backward", temp), program("b", "backward", 1.0)]
    fits, words = described(states, programs, 20)
    assert not fits
    too_much = sizes.get("state", 4.0) + 1.0 + temp - 20
    for part in (f"{too_much:.1f} GiB too much", f"{temp:.1f} a backward", helps):
        assert part in words


def test_verdict_reports_compile_errors_first():
    programs = [
        program("a", kind, 0.0, error="sm_80 has no such kernel")
        for kind in ("backward", "forward")
    ]
    fits, words = described(
        [state("a", 0)], [*programs, program("a", "update", 99.0)], 1, "a100-40"
    )
    assert not fits
    assert words == (
        "a backward (and 1 more) cannot be compiled for a100-40: sm_80 has no such kernel"
    )


# ---- one program ----


HEAD = ProgramReport("text forward", "text", "all", "sum", (1, 1, 1))


def test_compile_error_is_reported_in_one_line():
    def lower():
        raise NotImplementedError("sm_80 lacks\n  this kernel" + "!" * 500)

    report = compile_program(None, (), HEAD, lower, {})
    assert report.error.startswith("sm_80 lacks this kernel!!!")
    assert len(report.error) < 420
    assert error_line(KeyError()) == "KeyError"


def test_equal_programs_are_compiled_once():
    def lower(n):
        return lambda: jax.jit(lambda x: x @ x).lower(jnp.zeros((n, n)))

    known: dict = {}
    first, other, again = (compile_program(None, (), HEAD, lower(n), known) for n in (8, 16, 8))
    assert (first.flops, other.flops, again.flops) == (2 * 8**3, 2 * 16**3, 2 * 8**3)
    assert first.compile_s > 0 == again.compile_s
    assert (other.same_as, again.same_as) == ("", HEAD.name)
    assert first.argument_bytes == again.argument_bytes == 8 * 8 * 4


# ---- the process ----

FAKE = """
import os, sys, msgspec
sys.path[:0] = PATHS
from dflop_jax.aot.worker import PlanPrograms, Request
from dflop_jax.aot.reports import ProgramReport, SegmentMemory
for line in sys.stdin.buffer:
    request = msgspec.json.decode(line, type=Request)
    if request.config.model.size == "tiny":
        answer = PlanPrograms(error="of another model")
    elif request.program is None:
        state = SegmentMemory("s", "m", 0, 1e9, 0, 1, 0, "none")
        programs = [ProgramReport(f"s {n}", "s", "m", "forward", (1, 1, 1)) for n in range(3)]
        answer = PlanPrograms((state,), tuple(programs))
    else:
        if request.program == 1:
            os.write(2, b"first word\\nF1122 no tile fits\\n")
            os.abort()
        answer = ProgramReport(f"s {request.program}", "s", "m", "forward", (1, 1, 1))
    os.write(1, msgspec.json.encode(answer) + b"\\n")
"""


def test_compiler_crash_fails_one_program(monkeypatch):
    fake_compiler(monkeypatch, FAKE)
    seen = []
    with closing(Compiler()) as compiler:
        report = compile_plan(config(), NANO, compiler, lambda *n: seen.append(n))
        other = replace(config(), model=ModelConfig(size="tiny"))
        with pytest.raises(ValueError, match="of another model"):
            compile_plan(other, NANO, compiler)
    assert seen == [(n, 3) for n in (1, 2, 3)]
    assert [p.name for p in report.programs] == ["s 0", "s 1", "s 2"]
    assert [bool(p.error) for p in report.programs] == [False, True, False]
    assert report.programs[1].error == "the compiler died (signal 6): F1122 no tile fits"
    assert not report.fits
    assert report.exit_code == 1


def test_model_too_large_reports_the_missing_bytes(experiment, capsys, monkeypatch):
    fake_compiler(monkeypatch, FAKE.replace("os.abort()", "pass"))
    chosen = ["--plan.hardware", "h200", "--plan-file", "plan.json", "--plan.memory_bytes", "4e8"]
    assert main(["compile", experiment, *chosen]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "3 programs for 2 x h200" in said
    assert "does not fit h200: 0.9 of 0.4 GiB on m" in said
    assert "0.6 GiB too much; plan.zero 3, a larger tensor degree" in said


# ---- with the compiler ----


@needs_compiler
def test_plan_compiles_for_an_absent_chip(experiment, capsys):
    chosen = ["--plan.hardware", "h100", "--plan-file", "plan.json", "--json"]
    assert main(["compile", experiment, *chosen, "--out", "report.json"]) == 0
    report = load(CompileReport, "report.json")
    assert json.loads(capsys.readouterr().out)["verdict"] == report.verdict
    assert report.fits
    assert not [p for p in report.programs if p.error or p.unknown]
    trained = [p.executed_over_needed for p in report.programs if p.kind == "backward"]
    assert 1.0 <= min(trained) <= max(trained) < 3.0
    assert any(p.kind == "update" for p in report.programs)
    assert not Path("runs").exists()


HEADS = """
from dataclasses import replace
from models import llava

def build(size, dtype="float32", attention_kernel="auto"):
    model = llava.build("nano", dtype, attention_kernel)
    n_heads = max(4, 2048 // int(size))
    decoder = replace(model.size.decoder, width=n_heads * int(size), n_heads=n_heads, vocab=510)
    return replace(model, size=replace(model.size, decoder=decoder))
"""


@needs_compiler
def test_undivided_heads_compile_and_too_large_heads_are_reported(experiment):
    """Of 2 kv heads and 510 words each of 4 devices holds all, and none gathers any."""
    Path("heads.py").write_text(HEADS)
    llm, vision = SubmeshPlan("llm", 1, 1, 1, 4), NANO.layout.submeshes[0]
    plan = NANO.with_layout(submeshes=(vision, llm), buckets=(bucket(4, 256),))

    def job(head_dim, kernel):
        model = ModelConfig(
            factory="heads:build", size=head_dim, dtype="bfloat16", attention_kernel=kernel
        )
        chosen = PlanConfig(policy="dflop", hardware="a100-40", devices=5)
        # Few programs: nothing of the encoder trains.
        train = TrainConfig(freeze=("vision", "connector"))
        return Config(model=model, plan=chosen, train=train), plan

    with closing(Compiler()) as compiler:
        good, bad = (
            compile_plan(*job(*heads), compiler) for heads in (("256", "auto"), ("1024", "pallas"))
        )
    assert not [p.error for p in good.programs if p.error]
    (program,) = (p for p in good.programs if p.name == "llm backward 1x256")
    assert program.float32_dot_flops == 0.0
    assert 1.0 < program.executed_over_needed < 2.0
    assert not bad.fits
    assert bad.verdict.startswith("llm backward 1x256 cannot be compiled for a100-40: ")
    assert "hared memory" in bad.verdict
