"""Metrics beside values counted by hand, and edit distances beside a recursion."""

from functools import cache

import numpy as np
import pytest

from dflop_jax.evaluate.metrics import (
    METRICS,
    ScoredAnswer,
    check_metrics,
    chosen,
    edit_distance,
    mean_of,
    scores,
)


def one(name, said, *references, choices=()):
    return scores(name, [ScoredAnswer(said, references, choices)])[0]


@pytest.mark.parametrize(
    "name, said, references, wanted",
    [
        ("exact", "Red", ("red",), 1),
        ("exact", " a  red.\n", ("A red",), 1),
        ("exact", "reddish", ("red", "blue"), 0),
        ("exact", "blue", ("red", "blue"), 1),
        ("exact", "", ("red",), 0),
        ("relaxed", "104.9", ("100",), 1),
        ("relaxed", "105.1", ("100",), 0),
        ("relaxed", "-96", ("-100",), 1),
        ("relaxed", "1,050", ("1000",), 1),
        ("relaxed", "12%", ("0.12",), 1),
        ("relaxed", "12%", ("12",), 0),
        ("relaxed", "0", ("0.0",), 1),
        ("relaxed", "0.1", ("0",), 0),
        ("relaxed", "Yes.", ("yes",), 1),
        ("relaxed", "yes", ("no",), 0),
        ("relaxed", "1e400", ("2",), 0),
        ("anls", "kitten", ("sitting",), 1 - 3 / 7),
        ("anls", "abcd", ("abxy",), 0.5),
        ("anls", "abc", ("axy",), 0),
        ("anls", "Paris", ("London", "paris"), 1),
        ("anls", "", ("a",), 0),
        ("wer", "the cat sat", ("the cat sat on the mat",), 3 / 6),
        ("wer", "A b c d", ("a x",), 3 / 2),
        ("wer", "a b", ("x y z", "a c"), 1 / 2),
        ("wer", "", ("a b",), 1),
    ],
)
def test_values_counted_by_hand(name, said, references, wanted):
    assert one(name, said, *references) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "said, letter",
    [
        ("B", "B"),
        ("b.", "B"),
        ("(C)", "C"),
        ("C. a dog", "C"),
        ("The answer is B", "B"),
        ("It is an animal. Answer: (A)", "A"),
        ("I think (B) fits", "B"),
        ("It is (A) or (B)", ""),
        ("(A), though (B) is near", "A"),
        ("a bird", "A"),
        ("It shows a dog!", "C"),
        ("a bird and a dog", ""),
        ("A bird", "A"),
        ("E", ""),
        ("none", ""),
        ("", ""),
    ],
)
def test_the_choice_that_an_answer_names(said, letter):
    choices = ("a bird", "two cats", "a dog", "nothing here")
    assert chosen(said, choices) == letter
    assert one("choice", said, "C", choices=choices) == float(letter == "C")


def test_edit_distance_is_the_recursion_s():
    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = ("".join(rng.choice([*"abc"], rng.integers(0, 7))) for _ in range(2))

        @cache
        def least(i, j, a=a, b=b):
            if min(i, j) == 0:
                return i + j
            least_of = (least(i - 1, j) + 1, least(i, j - 1) + 1)
            return min(*least_of, least(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

        assert edit_distance(a, b) == least(len(a), len(b))


def test_means_are_of_those_with_references():
    answers = [
        ScoredAnswer("red", ("red",)),
        ScoredAnswer("a b", ("a c d e",)),
        ScoredAnswer("x", ()),
    ]
    assert [scores("exact", answers)[k] for k in range(3)] == [1, 0, None]
    assert mean_of("exact", answers) == 0.5
    assert mean_of("wer", answers) == pytest.approx(3 / 5)  # of all words, not of the records
    assert mean_of("choice", answers) is None
    assert all(mean_of(name, answers[2:]) is None for name in METRICS)
    assert all(mean_of(name, []) is None for name in METRICS)
    with pytest.raises(ValueError, match="no metric 'bleu'; there are exact, relaxed"):
        check_metrics(["exact", "bleu"])
