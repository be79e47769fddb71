"""Benchmarks write every row as it is made: the helper, and each script with all its default rows
at small sizes or, where minutes or hardware forbid that, the part that its line in `RUNS` states.

A new benchmark gets a line in `RUNS`, or in `ELSEWHERE` where another file runs its `main`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.scripts import BENCHMARKS, module
from tests.plans import nano_profile

json_rows = module("json_rows")

# Scripts that test_scripts.py runs.
ELSEWHERE = {"dispatch", "gpu_compile", "gpu_step", "packing_exact", "schedule_run", "two_process"}


@dataclass(frozen=True)
class Tiny:
    """A script's smallest call.

    Attributes:
      rows: how many rows it makes, each of which is written.
      prepare: makes it small, and files in the folder where it runs.
    """

    rows: int
    arguments: tuple[object, ...] = ()
    prepare: Callable[[ModuleType, pytest.MonkeyPatch], None] = lambda script, patch: None


# ---- what makes each small ----


def answers_of_nothing(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Planning of a 7B on a hundred devices takes minutes: no policy finds a plan."""
    patch.setattr(script, "answer", lambda case, policy: script.Answer("nothing fits"))
    patch.setattr(script, "judged", lambda case, answer: script.np.ones(case.n_reported))
    patch.setattr(script, "on_all_cores", map)


def cases_that_are_told(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """A child takes 10 s to start (test_scripts.py has real ones)."""

    def run(cases: range, seed: int, data: Path, seconds: float, tell: Callable) -> Any:
        counts, findings = script.Counter(), [script.Finding(0, "bytes", "fell over")]
        for case in cases:
            counts["bytes good" if case else "bytes finding"] += 1
            tell(counts, findings)
        return counts, findings

    patch.setattr(script, "run", run)


def runs_that_are_not_killed(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Real kills take minutes (tests/train/test_kills.py has some)."""
    kill = script.Kill("SIGKILL", 0, 3, True, 0.1)
    patch.setattr(script, "prepare", lambda *_: None)
    patch.setattr(script, "undisturbed", lambda *_: [1.0])
    patch.setattr(script, "killed_run", lambda *_: (0, [kill]))
    patch.setattr(script, "losses", lambda run_dir: [1.0])


def plans_made_up(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Planning for a thousand GPUs takes minutes: what it finds is made up."""
    plan = SimpleNamespace(predicted=SimpleNamespace(makespan_s=0.1))
    found = SimpleNamespace(plan=plan, n_placements=1, n_candidates=2, n_evaluated=1,
                            candidates=[SimpleNamespace(name="llm 1x1x8@0")])  # fmt: skip
    patch.setattr(
        script.run_context, "make_run_context", lambda c: SimpleNamespace(source=lambda: None)
    )
    patch.setattr(script, "make_profile", lambda place, source: nano_profile())
    patch.setattr(script.planning, "make_plan", lambda place, profile: found)


def launched(rows: Callable[[list[str]], object]) -> Callable[..., None]:
    """Two processes that train take minutes: `rows` are what they would write."""

    def prepare(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
        def launch(command: list[str], n: int, **_: object) -> Any:
            out = Path(command[command.index("--worker") + 1])
            json_rows.write_json(out, rows(command))
            return SimpleNamespace(exit_code=0)

        patch.setattr("dflop_jax.cli.launch.launch", launch)

    return prepare


def schedules_of(command: list[str]) -> object:
    seconds = ("calibrated_s", "chosen_by_s", "layers_s", "measured_s")
    row = dict.fromkeys(seconds, 0.1) | {"steps_s": [0.1, 0.2], "groups": [], "others_share": 0.0}
    row |= {"plan": "orch", "submeshes": "all", "batch": 8, "disturbed": 0, "concurrency": 1.0}
    return [row] * 2


def runs_of_nobody(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """A run profiles, plans and compiles for minutes."""
    figures = ("planned_s", "measured_s", "measured_over_planned", "tokens_per_s", "mfu",
               "planned_gib", "peak_gib", "seconds")  # fmt: skip
    row = dict.fromkeys(figures, 1.0) | {"policy": "orch", "compiles": 0, "steps_s": [0.1]}
    patch.setattr(script, "run_row", lambda name, *_, tiny: {"name": name, **row})
    patch.setattr(script, "exact_row", lambda folder: {"name": script.EXACT, "resumed_equal": True})


def nothing_tried(script: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Hosts with names of their own are made by root only, and train for minutes."""

    def tried(site: Any, hosts: Any) -> str:
        """Nothing"""
        return "nothing"

    patch.setattr(script, "needs", lambda: "")
    patch.setattr(script.Site, "prepare", lambda site: None)
    patch.setattr(script.virtual_hosts, "virtual_hosts", lambda number: nullcontext())
    patch.setattr(script, "TRIED", (tried, tried))


RUNS = {
    "auto_choice": Tiny(2, ("--random", 2, "--first", 1), answers_of_nothing),
    "fuzz_data": Tiny(2, ("--cases", 2), cases_that_are_told),
    "gpu_run": Tiny(5, (), runs_of_nobody),
    "hosts": Tiny(2, (), nothing_tried),
    "kills": Tiny(2, ("--kills", 2), runs_that_are_not_killed),
    "planner": Tiny(30, ("--full", "--repeats", 1), plans_made_up),
    "simulator": Tiny(3, ("--runs", 1), launched(schedules_of)),
}


@pytest.fixture
def written(monkeypatch):
    """What was written to rows.json, every time, whole."""
    each: list[object] = []
    rename = Path.replace

    def noted(self: Path, target: Path) -> Path:
        if str(target) == "rows.json":  # not one of a script's own
            each.append(json.loads(self.read_text()))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    return each


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("name", RUNS)
def test_every_row_is_written_as_it_is_made(name, written, tmp_path, monkeypatch, capsys):
    script, tiny = module(name), RUNS[name]
    monkeypatch.chdir(tmp_path)
    tiny.prepare(script, monkeypatch)
    given = ["--json", "rows.json"] if tiny.rows else []
    monkeypatch.setattr(sys, "argv", [name, *map(str, tiny.arguments), *given])
    assert not script.main()
    assert len(written) >= tiny.rows
    for before, after in itertools.pairwise(written):
        assert len(json.dumps(before)) <= len(json.dumps(after))
    if tiny.rows:
        assert json.loads(Path("rows.json").read_text()) == written[-1]
        assert not [f for f in Path().iterdir() if f.suffix == ".tmp"]
        if isinstance(written[-1], list):
            assert len(written[-1]) == tiny.rows
    assert capsys.readouterr().out


def test_every_benchmark_is_run():
    """Files without a `main` are parts of others."""
    has_main = {f.stem for f in BENCHMARKS.glob("*.py") if "\ndef main(" in f.read_text()}
    assert {*RUNS} | ELSEWHERE == has_main, "a new benchmark needs a line in RUNS or ELSEWHERE"
    text = (Path(__file__).parent / "test_scripts.py").read_text()
    assert all(f'"{name}"' in text for name in ELSEWHERE)


# ---- the helper ----


def test_rows_are_printed_and_written(tmp_path, capsys):
    @dataclass(frozen=True)
    class Row:
        name: str
        value: float

    file = tmp_path / "rows.json"
    rows = json_rows.Rows(file, json_rows.as_rows)
    for i, value in enumerate((1.0, np.float32(0.5), float("inf"))):
        rows.append(Row(f"{tmp_path.name}{i}", value))
        assert len(json.loads(file.read_text())["rows"]) == i + 1
    assert [r["value"] for r in json.loads(file.read_text())["rows"]] == [1.0, 0.5, None]
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert list(tmp_path.iterdir()) == [file]


def test_a_row_that_cannot_be_written_leaves_those_before_it(tmp_path):
    file = tmp_path / "rows.json"
    rows = json_rows.Rows(file)
    rows.append({"n": 1})
    with pytest.raises(TypeError, match="a Image has no form"):
        rows.append({"n": Image.new("L", (1, 1))})
    assert json.loads(file.read_text()) == [{"n": 1}]
