"""Every message about a mistake says what to do, and docs/errors.md has them all."""

import ast

import pytest

from tests.errors_page import PAGE, REMEDY, Message, _raised, messages, page

# Put together with what says it, where they are caught or made.
ELSEWHERE = {
    "…: coordinator …",
    "coordinator …: …",
    "--coordinator: …",
    "step …: …",
}


def test_every_message_says_what_to_do():
    silent = {
        f"{m.file}: {m.text}"
        for m in messages()
        if m.is_whole and not m.says_what_to_do and m.text not in ELSEWHERE
    }
    assert silent == set()


def test_the_page_is_that_of_the_source():
    assert PAGE.read_text(encoding="utf-8") == page(messages()), "run make errors"


@pytest.mark.parametrize(
    "text, says",
    [
        ("a.json: no such file; check the path", True),
        ("a.json: no such file", False),
        ("train.steps=0 must be at least 1", True),
        ("the plan lacks an edge; plan again", True),
        ("unknown field stepz; did you mean steps?", True),
        ("the giver of names was named", False),
        ("this is of another model", False),
    ],
)
def test_remedies_are_told_from_facts(text, says):
    assert bool(REMEDY.search(text)) == says


def test_messages_are_read_whole():
    source = """
def f(x):
    if x:
        raise ValueError(f"{x}: no such " "file" + f"; check {x!r}")
    raise TryAgain("a" if x else f"b {x}") from None
    raise KeyError("not said in a line")
"""
    assert sorted(_raised(ast.parse(source))) == ["a", "b {x}", "{x}: no such file; check {x}"]
    assert Message("cli/a.py", "…", "{why}").is_whole is False
    assert Message("data/media/a.py", "no frames", "no frames").is_whole is False
