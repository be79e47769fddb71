"""Notes that wait for a mistake to be found, and tables that fit."""

import time
from types import SimpleNamespace

import pytest
from rich.table import Table

from dflop_jax.cli import compile, plan, terminal
from dflop_jax.cli.terminal import HeldNotes, show

LIMIT_S = 30.0


def shown(capsys):
    return capsys.readouterr().err.splitlines()


def test_notes_wait_until_they_are_ready(capsys):
    notes = HeldNotes()
    notes.add("a")
    assert shown(capsys) == []
    notes.add("b", ready=True)
    notes.add("c")
    assert shown(capsys) == ["a", "b", "c"]
    notes.show()
    assert shown(capsys) == []


@pytest.mark.parametrize("n", [0, 1])
def test_notes_that_are_dropped_never_come(capsys, n):
    notes = HeldNotes()
    for k in range(n):
        notes.add(f"{k}")
    notes.drop()
    notes.show()
    assert shown(capsys) == []


def test_notes_come_when_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "HELD_S", 0.01)
    notes, seen, stop_s = HeldNotes(), [], time.monotonic() + LIMIT_S
    notes.add("a")
    while not seen and time.monotonic() < stop_s:
        time.sleep(0.01)
        seen = shown(capsys)
    notes.add("b")
    assert seen + shown(capsys) == ["a", "b"]


def programs(name):
    one = SimpleNamespace(
        name=name, mesh=(2, 1, 8), error="", executed_over_needed=1.03, same_as="",
        collectives={"all-reduce": 3e9}, compile_s=123.4, argument_bytes=12e9, unknown=0,
        temp_bytes=33e9, float32_dot_flops=1e9, flops=2e12,
        kind="forward",
    )  # fmt: skip
    report = SimpleNamespace(programs=[one] * 2, n_nodes=2, n_devices=16, chip="h100")
    return compile._table(report)


def placements(name, explain=True):
    one = SimpleNamespace(
        policy="dflop", name=name, microbatches=8, group_size=2, makespan_s=0.4, peak_bytes=44e9,
        saving="vision dots, llm zero 3 layers", busy_s={"vision": 0.1, "llm": 0.5},
    )  # fmt: skip
    other = SimpleNamespace(**vars(one) | {"makespan_s": 0.5})
    counts = {"n_evaluated": 9, "n_candidates": 9, "n_placements": 9, "n_fit": 9}
    return plan.ranking(SimpleNamespace(candidates=[one, other], **counts), explain)


def of_columns(name, n):
    table = Table("figure")
    for i in range(n):
        table.add_column(f"run-{i}", overflow="fold")
    table.add_row(name, *["1,234.5 ms"] * n)
    return table


@pytest.mark.parametrize(
    "make, figure",
    [
        (programs, "123.4"),
        (placements, "500.0"),
        (lambda name: placements(name, explain=False), "500.0"),
        (lambda name: plan.what_ifs([SimpleNamespace(change=name, makespan_s=0.5)]), "500.0"),
        (lambda name: of_columns(name[:30], 8), "1,2"),
    ],
)
@pytest.mark.parametrize("name", ["llm forward 2 x 96", "vision 1 x 8 x 1 @ 0 " * 3, "x" * 120])
def test_a_table_keeps_its_first_column_and_its_figures(make, figure, name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(make(name))
    lines = capsys.readouterr().out.splitlines()
    assert any(name[:30] in line for line in lines)
    assert any(name.rstrip() in line for line in lines) or make("a").columns[1].overflow == "fold"
    assert any(figure in line for line in lines)
    assert not any("…" in line for line in lines)
    assert all(len(line) <= 80 or name in line for line in lines)
