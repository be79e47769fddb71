"""Records of a question with answers beside it, and perhaps choices, in columns of their own: as
DocVQA, ChartQA, MMMU and sets like these are published."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from dflop_jax.data.datasets.conversations import Turns

QUESTION, ANSWERS, CHOICES = "question", "answers", "choices"
# The fields, and the names that public sets give them.
SPELLINGS = {
    QUESTION: (QUESTION, "query", "prompt"),
    ANSWERS: (ANSWERS, "answer", "label", "completion", "response"),
    CHOICES: (CHOICES, "options"),
}
MAX_NUMBERED_MEDIA = 9  # media that stand in columns of their own, image_1 and on
LETTERS = string.ascii_uppercase
BY_LETTER = "Answer with the letter of the right choice."
_NUMBERED_TAG = re.compile(r"<(\w+)[ _](\d+)>")


def parse_question(
    fields: Mapping[str, Any], media: Mapping[str, list[Any]]
) -> tuple[Turns, dict[str, list[Any]]]:
    """Return the question of a record and its first answer as turns, and the media in the order of
    their tags by kind.

    Media are where the question's text has their tags; media that it does not name come first. Of a
    question with choices the answer is a letter.

    Args:
      fields: of the record, by `SPELLINGS`.
      media: those that are named beside the text, by kind.

    Raises:
      ValueError: no text, or unusable answers or choices.
    """
    text = fields.get(QUESTION)
    if isinstance(text, Mapping):  # by language, as DocVQA's set of questions has it
        text = text.get("en")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its question is no text")
    choices = _parse_choices(fields.get(CHOICES))
    answer = _parse_answer(fields.get(ANSWERS), choices)
    if choices:
        listed = (f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        text = "\n".join([text, *listed, BY_LETTER])
    text, ordered = _place_tags(text, media)
    return (("human", text), ("gpt", answer)), ordered


def _place_tags(text: str, media: Mapping[str, list[Any]]) -> tuple[str, dict[str, list[Any]]]:
    """Return the text with numbered tags as plain ones, and the media in the order of all tags."""
    numbers: dict[str, list[int]] = {kind: [] for kind in media}

    def replace_tag(tag: re.Match[str]) -> str:
        kind, number = tag[1], int(tag[2])
        if kind not in media:
            return tag[0]
        if not 1 <= number <= len(media[kind]):
            raise ValueError(f"its question names {tag[0]}, and there are {len(media[kind])}")
        numbers[kind].append(number)
        return f"<{kind}>"

    text = _NUMBERED_TAG.sub(replace_tag, text)
    if not any(numbers.values()) and any(f"<{kind}>" in text for kind in media):
        return text, {**media}
    ordered_media, leading_tags = {}, ""
    for kind, values in media.items():
        unnamed = [m for n, m in enumerate(values, 1) if n not in numbers[kind]]
        leading_tags += f"<{kind}>" * len(unnamed)
        ordered_media[kind] = unnamed + [values[n - 1] for n in numbers[kind]]
    return (f"{leading_tags}\n{text}" if leading_tags else text), ordered_media


def _parse_choices(raw: Any) -> tuple[str, ...]:
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


def _parse_answer(raw: Any, choices: Sequence[str]) -> str:
    """Return the first answer that has text, "" where none has; of a question with choices a
    letter."""
    for value in raw if isinstance(raw, list) else [] if raw is None else [raw]:
        value = value.get("answer") if isinstance(value, Mapping) else value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"an answer is {value!r:.50}, no text")
        if str(value).strip():
            return _choice_letter(value, choices) if choices else str(value)
    return ""


def _choice_letter(value: str | float, choices: Sequence[str]) -> str:
    """Return the letter of a choice that is given by its number from 0, its letter or its text."""
    letters = LETTERS[: len(choices)]
    if isinstance(value, int) and 0 <= value < len(choices):
        return letters[value]
    text = str(value).strip()
    if text in [*letters]:
        return text
    if text in choices:
        return letters[[*choices].index(text)]
    raise ValueError(f"its answer {text!r:.50} is none of its {len(choices)} choices")
