"""How good answers are beside those that are right, from 0 to 1; the share of wrong words is lower
for better answers, and may be above 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

TOLERANCE = 0.05  # of numbers, by relaxed match
LEAST_SIMILARITY = 0.5  # below which ANLS counts an answer as wrong


class ScoredAnswer(NamedTuple):
    """What was said, and what would have been right.

    Attributes:
      references: answers that are right; letters where there are `choices`, one or more.
    """

    said: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()


def exact(a: ScoredAnswer) -> float:
    """Whether the answer is one of the references, but for case, space and a stop at its end."""
    return float(_plain(a.said) in map(_plain, a.references))


def relaxed(a: ScoredAnswer) -> float:
    """Whether a number is within 5% of a reference's, and other text the same (ChartQA, arXiv
    2203.10244)."""
    return max(float(_is_close(a.said, reference)) for reference in a.references)


def anls(a: ScoredAnswer) -> float:
    """Largest similarity to a reference: 1 less the edits of characters over the longer one's, 0
    where that is below a half (average normalised Levenshtein similarity, arXiv 1905.13648)."""
    return max(_similarity(_plain(a.said), _plain(r)) for r in a.references)


def choice(a: ScoredAnswer) -> float:
    """Whether the choice that the answer names, by its letter or else its text, is right."""
    return float(chosen(a.said, a.choices) in a.references)


def chosen(said: str, choices: Sequence[str]) -> str:
    """The letter of the choice that an answer names, at its beginning before any other; "" if it
    names none, or several."""
    letters = [chr(ord("A") + k) for k in range(len(choices))]
    text = said.strip()
    alone = re.fullmatch(r"[(\[]?([A-Za-z])[)\].:,]*", text)
    if alone and alone[1].upper() in letters:
        return alone[1].upper()
    marked = re.match(r"[(\[]?([A-Z])[)\].:]+,?(?:\s|$)", text)
    named = re.findall(r"(?:answer|choice|option)\s*(?:is|:)?\s*[(\[]?([A-Z])\b", text, re.I)
    for letter in [*([marked[1]] if marked else []), *(n.upper() for n in named[-1:])]:
        if letter in letters:
            return letter
    bracketed = {m for m in re.findall(r"\(([A-Z])\)", text) if m in letters}
    if len(bracketed) == 1:
        return bracketed.pop()
    plain = _plain(said)
    equal = [n for n, c in zip(letters, choices, strict=True) if _plain(c) == plain]
    within = [n for n, c in zip(letters, choices, strict=True) if _is_within(_plain(c), plain)]
    return equal[0] if equal else within[0] if len(within) == 1 else ""


def wrong_words(a: ScoredAnswer) -> tuple[int, int]:
    """(edits of words from the nearest reference to the answer, words of that reference)."""
    said = a.said.casefold().split()
    edits = [
        (edit_distance(words, said), len(words))
        for words in (r.casefold().split() for r in a.references)
    ]
    return min(edits, key=lambda e: e[0] / max(1, e[1]))


def edit_distance(one: Sequence[object], other: Sequence[object]) -> int:
    """The fewest insertions, deletions and replacements that make one sequence the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


WER = "wer"
OF_ONE: dict[str, Callable[[ScoredAnswer], float]] = {
    "exact": exact,
    "relaxed": relaxed,
    "anls": anls,
    "choice": choice,
}
METRICS = (*OF_ONE, WER)


def check_metrics(names: Sequence[str]) -> None:
    """ValueError for a name of no metric."""
    if unknown := [n for n in names if n not in METRICS]:
        raise ValueError(f"no metric {unknown[0]!r}; there are {', '.join(METRICS)}")


def scores(name: str, answers: Sequence[ScoredAnswer]) -> list[float | None]:
    """A metric of each answer; None of one that has no references (of `choice`: no choices)."""
    if name == WER:
        words = [wrong_words(a) if a.references else None for a in answers]
        return [w and w[0] / max(1, w[1]) for w in words]
    fits = (bool(a.references) and (name != "choice" or bool(a.choices)) for a in answers)
    return [OF_ONE[name](a) if fit else None for a, fit in zip(answers, fits, strict=True)]


def mean_of(name: str, answers: Sequence[ScoredAnswer]) -> float | None:
    """A metric of all answers that have references, None where none has: the mean; of `wer` all
    edits over all words."""
    if name == WER:
        words = [wrong_words(a) for a in answers if a.references]
        return sum(e for e, _ in words) / max(1, sum(n for _, n in words)) if words else None
    known = [s for s in scores(name, answers) if s is not None]
    return sum(known) / len(known) if known else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()


def _is_close(said: str, reference: str) -> bool:
    a, b = _number(said), _number(reference)
    if a is None or b is None or not b:
        return _plain(said) == _plain(reference) or (a is not None and a == b)
    return abs(a - b) <= TOLERANCE * abs(b)


def _number(text: str) -> float | None:
    """A number, a percentage as its share; None of other text."""
    plain = _plain(text).replace(",", "")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?%?", plain):
        return None
    return float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)


def _similarity(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    similarity = 1 - edit_distance(one, other) / longest if longest else 1.0
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def _is_within(part: str, text: str) -> bool:
    """Whether some words stand in a text."""
    return bool(part) and re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None
