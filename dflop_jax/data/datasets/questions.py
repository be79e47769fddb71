"""Records of a question with answers beside it, and perhaps choices, in columns of their own: as
DocVQA, ChartQA, MMMU and sets like these are published."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflop_jax.data.bounds import MAX_TURNS

QUESTION, ANSWERS, CHOICES = "question", "answers", "choices"
# The fields, and the names that public sets give them.
SPELLINGS = {
    QUESTION: (QUESTION, "query", "prompt"),
    ANSWERS: (ANSWERS, "answer", "label", "completion", "response"),
    CHOICES: (CHOICES, "options"),
}
MOST_NUMBERED = 9  # media that stand in columns of their own, image_1 and on
LETTERS = string.ascii_uppercase
BY_LETTER = "Answer with the letter of the right choice."
_NUMBERED_TAG = re.compile(r"<(\w+)[ _](\d+)>")


class TableQuestion(NamedTuple):
    """A question as its text says it, with tags of its media, and these in their order by kind.

    Attributes:
      answers: those that are right; of a question with choices letters.
      choices: in the order of their letters.
    """

    text: str
    media: Mapping[str, Sequence[Any]]
    answers: tuple[str, ...]
    choices: tuple[str, ...]


def asked(fields: Mapping[str, Any], media: Mapping[str, Sequence[Any]]) -> TableQuestion:
    """The question of a record.

    Media stand where its text has their tags, those that it does not name before it.

    Args:
      fields: of the record, by `SPELLINGS`.
      media: those that stand beside the text, by kind.

    Raises:
      ValueError: no text, or answers or choices that are none.
    """
    text = fields.get(QUESTION)
    if isinstance(text, Mapping):  # by language, as DocVQA's set of questions has it
        text = text.get("en")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its question is no text")
    choices = _choices(fields.get(CHOICES))
    answers = _answers(fields.get(ANSWERS), choices)
    if choices:
        listed = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        text = "\n".join([text, *listed, BY_LETTER])
    text, ordered = _tagged(text, media)
    return TableQuestion(text, ordered, answers, choices)


def _tagged(
    text: str, media: Mapping[str, Sequence[Any]]
) -> tuple[str, Mapping[str, Sequence[Any]]]:
    """Text in which numbered tags are plain ones, and the media in the order of all tags."""
    ordered: dict[str, list[Any]] = {kind: [] for kind in media}
    named: dict[str, set[int]] = {kind: set() for kind in media}

    def plain(tag: re.Match[str]) -> str:
        kind, number = tag[1], int(tag[2])
        if kind not in media:
            return tag[0]
        if not 1 <= number <= len(media[kind]):
            raise ValueError(f"its question names {tag[0]}, and there are {len(media[kind])}")
        ordered[kind].append(media[kind][number - 1])
        named[kind].add(number)
        return f"<{kind}>"

    if any(tag[1] in media for tag in _NUMBERED_TAG.finditer(text)):
        text = _NUMBERED_TAG.sub(plain, text)
        rest = {
            kind: [m for n, m in enumerate(values, 1) if n not in named[kind]]
            for kind, values in media.items()
        }
    elif any(f"<{kind}>" in text for kind in media):
        return text, media
    else:
        rest = {kind: [*values] for kind, values in media.items()}
    before = "".join(f"<{kind}>" * len(values) for kind, values in rest.items())
    whole = {kind: [*rest[kind], *ordered[kind]] for kind in media}
    return (f"{before}\n{text}" if before else text), whole


def _choices(raw: Any) -> tuple[str, ...]:
    if raw in (None, "", []):
        return ()
    if isinstance(raw, str):  # MMMU writes a list of Python
        try:
            raw = ast.literal_eval(raw)
        except (ValueError, SyntaxError):
            raise ValueError("its choices are no list") from None
    if not isinstance(raw, list | tuple) or len(raw) > len(LETTERS):
        raise ValueError(f"its choices are no list of at most {len(LETTERS)}")
    return tuple(str(choice) for choice in raw)


def _answers(raw: Any, choices: Sequence[str]) -> tuple[str, ...]:
    values = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if len(values) > MAX_TURNS:
        raise ValueError(f"more than {MAX_TURNS} answers in one record")
    answers = []
    for value in values:
        value = value.get("answer") if isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"an answer is {value!r:.50}, no text")
        answers.append(_letter(value, choices) if choices else str(value))
    return tuple(dict.fromkeys(a for a in answers if a.strip()))


def _letter(value: str | float, choices: Sequence[str]) -> str:
    """The letter of a choice that is said by its number from 0, its letter or its text."""
    letters = LETTERS[: len(choices)]
    if isinstance(value, int) and 0 <= value < len(choices):
        return letters[value]
    text = str(value).strip()
    if text in [*letters]:
        return text
    if text in choices:
        return letters[[*choices].index(text)]
    raise ValueError(f"its answer {text!r:.50} is none of its {len(choices)} choices")
