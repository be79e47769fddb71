"""Two of the papers' results from end to end, on a model small enough for a test."""

import ast
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.records import Load
from experiments.paper import (
    answers,
    cases,
    causes,
    costs,
    dflop,
    report,
    results,
    systems,
    throughput,
)
from experiments.paper.answers import DFLOP, MEGATRON, PUBLIC_RULE, PYTORCH, answer, prepare
from experiments.paper.cases import Case
from models.llava import build

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Nano:
    def __call__(self):
        return build("anyres-nano", "bfloat16")


@dataclass(frozen=True)
class Drawn:
    def __call__(self, n, seed):
        rng, tile = np.random.default_rng(seed), Nano()().piece_tokens["vision"]
        both = rng.integers((0, 64), (6, 512), (n, 2)).tolist()
        return [Load({"vision": (tile,) * tiles, "llm": (tokens,)}) for tiles, tokens in both]


TINY = Case("tiny + nano", Nano(), Drawn(), 8, 32, systems.CLUSTER)


@pytest.fixture(scope="module", autouse=True)
def small_profiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "SEEN", 64)
        patch.setattr(cases, "TUNING", 2)
        patch.setattr(costs, "DEGREES", (1, 2))
        patch.setattr(costs, "ITEMS", (1, 8))
        patch.setattr(costs, "TOKENS", (512, 2048))
        yield


@pytest.mark.slow
def test_an_experiment_runs_and_is_reported(tmp_path, capsys):
    result = dflop.scaling(TINY, nodes=(1,))
    assert [row[:2] for row in result.rows] == [["1", "256"], ["1", "32"]]
    for batch in (256, 32):
        case = dflop.on_nodes(TINY, 1, batch)
        every = p, m, d = [answer(case, s) for s in (PYTORCH, MEGATRON, DFLOP)]  # known already
        assert all(0 <= a.idle_share < 1 and a.idle_device_s >= 0 for a in every)
        assert all(len(a.steps) == case.batches for a in every)
        row = next(row for row in result.rows if row[1] == str(batch))
        assert row[2:5] == [f"{batch / a.step_s:.2f}" for a in every]
        assert row[5:] == [f"{a.step_s / d.step_s:.2f}x" for a in (p, m)]
    results.print_result(result)
    assert "the gap widens with nodes" in capsys.readouterr().out
    report.draw(result, tmp_path / "scaling.png")
    page = report.write_timelines(TINY, tmp_path)
    text = report.write_report([result], tmp_path, page, 1.0).read_text(encoding="utf-8")
    for row in result.rows:
        assert "| " + " | ".join(row) + " |" in text
    assert "![" + result.title + "](scaling.png)" in text
    assert "CC BY 4.0" in text
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    html = page.read_text(encoding="utf-8")
    assert "pytorch, simulated" in html
    assert "arrival" in html


@pytest.mark.slow
def test_the_product_beside_true_shapes_and_a_baseline_that_no_one_tuned(monkeypatch):
    monkeypatch.setattr(throughput, "HOURS", {TINY.name: (27.0, 10.0)})
    monkeypatch.setattr(causes, "HOURS", {TINY.name: (27.0, 10.0)})
    (row,) = throughput.throughput([TINY]).rows
    made = {s: answer(TINY, s) for s in throughput.SYSTEMS}
    assert row[1:7] == [f"{TINY.global_batch / a.step_s:.2f}" for a in made.values()]
    base, here = made[answers.PUBLISHED], made[throughput.HERE]
    assert base.step_s >= min(made[s].step_s for s in (PYTORCH, MEGATRON))
    assert here.plan.policy == "dflop"
    assert row[-1].split(", ")[0] == f"{base.step_s / here.step_s:.2f}x"
    for module, share in answers.padding(TINY, here).items():
        used = sum(x.tokens(module) for b in cases.reported(TINY) for x in b)
        room = sum(
            here.plan.layout.data_ranks(module) * g.microbatches * g.shape.rows * g.shape.tokens
            for step in here.steps
            for g in step.schedule.groups
            if g.module == module
        )
        assert 0 <= share < 1
        assert share == pytest.approx(1 - used / room)
    (row,) = throughput.epochs([TINY]).rows
    assert row[1:3] == ["27, 10", "2.7x"]
    assert row[-2].startswith(f"{base.step_s / made[DFLOP].step_s:.2f}x")
    spans, hours, less = causes._dflop([TINY])
    assert spans[1] == "1.2x to 3.6x"
    assert hours[1:] == ["2.7x", row[-2].split(", ")[1], spans[3], row[-2].split(", ")[0]]
    assert less[-1].count("%") == 2


def test_stages_and_load_ratios_are_what_segments_compute():
    made = answer(TINY, DFLOP)
    spent_s = {s.name: made.busy_s(s.name) for s in made.plan.layout.segments}
    rates = dflop.stage_rates(TINY, made)
    assert min(rates) >= TINY.global_batch / sum(spent_s.values())
    devices = {
        s.name: made.plan.layout.submesh(s.submesh).n_devices for s in made.plan.layout.segments
    }
    device_s = {name: s * devices[name] for name, s in spent_s.items()}
    encoder = sum(device_s[s.name] for s in made.plan.layout.segments_of("vision"))
    assert dflop.load_ratio(made) == pytest.approx(encoder / (sum(device_s.values()) - encoder))


def test_answers_are_remembered(monkeypatch):
    asked = []
    monkeypatch.setattr(answers, "_KNOWN", {})
    monkeypatch.setattr(answers, "_answer", lambda *key: asked.append(key) or "made")
    assert answer(TINY, DFLOP) == answer(TINY, DFLOP) == "made"
    assert asked == [(TINY, DFLOP)]
    prepare([(TINY, DFLOP)])  # known, so nothing is started
    assert len(asked) == 1


def test_the_public_rule_is_a_system_of_its_own():
    made = answer(TINY, PUBLIC_RULE)
    assert made.n_microbatches >= 1
    assert made.step_s >= answer(TINY, DFLOP).step_s * 0.95


def imports(file):
    """Modules of experiments.paper that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module == "experiments.paper":
            yield from (alias.name for alias in node.names)
        elif module.startswith("experiments.paper."):
            yield module.rpartition(".")[2]


def test_no_module_imports_itself_through_others():
    files = (ROOT / "experiments" / "paper").glob("*.py")
    left = {file.stem: set(imports(file)) for file in files}
    assert left["answers"]
    while leaves := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in leaves:
            del left[name]
    assert left == {}, "these import one another in a circle"
