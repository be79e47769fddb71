"""Notes that wait for a mistake to be found, and tables that fit."""

from types import SimpleNamespace

import pytest

from dflop_jax.cli import plan
from dflop_jax.cli.terminal import DelayedNotes, make_table, show

LIMIT_S = 30.0


def shown(capsys):
    return capsys.readouterr().err.splitlines()


def test_notes_wait_until_they_are_ready(capsys):
    notes = DelayedNotes()
    notes.add("a")
    assert shown(capsys) == []
    notes.add("b", shows_now=True)
    notes.add("c")
    assert shown(capsys) == ["a", "b", "c"]
    notes.show()
    assert shown(capsys) == []


def placements(name):
    one = SimpleNamespace(
        policy="dflop", name=name, microbatches=8, group_size=2, makespan_s=0.4, peak_bytes=44e9,
        saving="vision dots, llm zero 3 layers", busy_s={"vision": 0.1, "llm": 0.5},
    )  # fmt: skip
    other = SimpleNamespace(**vars(one) | {"makespan_s": 0.5})
    counts = {"n_evaluated": 9, "n_candidates": 9, "n_placements": 9, "n_fit": 9}
    return plan.ranking_table(SimpleNamespace(candidates=[one, other], **counts), True)


def of_runs(name):
    return make_table(
        "", ("figure", *(f"run-{i}" for i in range(8))), [(name, *["1,234.5 ms"] * 8)]
    )


@pytest.mark.parametrize("make, figures", [(placements, ["40.98", "500.0"]), (of_runs, ["1,2"])])
@pytest.mark.parametrize("name", ["vision 1 x 8 x 1 @ 0 " * 3, "x" * 120])
def test_a_table_fits_into_a_terminal_and_loses_nothing(make, figures, name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(make(name))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert all(figure in out for figure in figures)
    assert out.count("x") >= name.count("x")
