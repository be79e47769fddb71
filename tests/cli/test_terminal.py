"""Notes that wait for a mistake to be found."""

import time

import pytest

from dflop_jax.cli import terminal
from dflop_jax.cli.terminal import HeldNotes

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
