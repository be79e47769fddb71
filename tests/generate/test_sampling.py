"""Which token is drawn, and where an answer ends."""

import json

import jax
import numpy as np
import pytest

from dflop_jax.data import ByteTokenizer
from dflop_jax.generate.generate import _AnswerStream, end_token_ids
from dflop_jax.generate.sampling import Sampling, SamplingArgs, sample_tokens


def shares(logits, temperature, top_k, top_p):
    """Of each token, by numpy."""
    order = np.argsort(-logits)
    kept = order[: top_k or len(order)]
    weight = np.exp(logits[kept] / temperature)
    weight /= weight.sum()
    kept = kept[: 1 + int((np.cumsum(weight) < top_p).sum())]
    share = np.zeros(len(logits))
    share[kept] = np.exp(logits[kept] / temperature)
    return share / share.sum()


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(0.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 0, 0.6), (2.0, 0, 1e-6), (1.0, 2, 1.0), (1.0, 3, 0.6),
     (1.0, 1, 1.0), (1.0, 9, 1.0)],
)  # fmt: skip
def test_tokens_are_drawn_as_their_shares_say(temperature, top_k, top_p):
    logits = np.log(np.float32([0.1, 0.4, 0.05, 0.3, 0.15]))
    n = 4000
    draw = SamplingArgs.from_sampling(Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    rows = np.broadcast_to(logits, (n, 5))
    tokens = jax.jit(sample_tokens)(
        draw, rows, np.zeros((n, 5), bool), np.arange(n, dtype=np.uint32), np.zeros(n, np.int32)
    )
    drawn = np.bincount(np.asarray(tokens), minlength=5) / n
    share = shares(logits, temperature, top_k, top_p) if temperature else np.eye(5)[1]
    np.testing.assert_allclose(drawn, share, atol=0.03)
    assert (drawn[share == 0] == 0).all()


def test_a_draw_depends_on_its_answer_and_not_on_others():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    draw = SamplingArgs.from_sampling(Sampling(temperature=1.0, seed=5))
    said, nth = np.zeros((3, 50), bool), np.array([0, 7, 7], np.int32)
    number = np.array([2, 0, 1], np.uint32)
    run = jax.jit(sample_tokens)
    together = run(draw, logits, said, number, nth)
    for k in range(3):
        one = slice(k, k + 1)
        assert run(draw, logits[one], said[one], number[one], nth[one])[0] == together[k]
    same = [np.broadcast_to(a[:1], (400, *a.shape[1:])) for a in (logits, said)]
    numbers = np.arange(400, dtype=np.uint32)
    by_number = run(draw, *same, numbers, np.zeros(400, np.int32))
    by_place = run(draw, *same, np.zeros(400, np.uint32), numbers.astype(np.int32))
    by_seed = run(draw._replace(seed=np.uint32(6)), *same, numbers, np.zeros(400, np.int32))
    assert min(len(set(np.asarray(a).tolist())) for a in (by_number, by_place)) > 20
    assert (by_seed != by_number).any()


def test_what_was_said_is_said_less():
    logits = np.float32([[2.0, 1.8, -1.0, -1.1]] * 3)
    said = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], bool)
    draw = SamplingArgs.from_sampling(Sampling(repetition_penalty=1.5))
    args = said, np.zeros(3, np.uint32), np.zeros(3, np.int32)
    assert sample_tokens(draw, logits, *args).tolist() == [0, 1, 0]
    below = logits - 2.0  # 0, -0.2, -3, -3.1
    below[:, 0] = -0.15
    assert sample_tokens(draw, below, *args).tolist() == [0, 1, 0]


ENDS = frozenset({ByteTokenizer.im_end_id})


def answer(text, how, *, is_shown=True):
    """(what was said, what was shown) of an answer of these bytes, then the end token."""
    shown = []
    said = _AnswerStream(ByteTokenizer(), ENDS, how, shown.append if is_shown else None)
    for token in [*text.encode(), ByteTokenizer.im_end_id]:
        said.add(token)
    return said.answer, shown


@pytest.mark.parametrize(
    "text, stop, says, why",
    [
        ("one END two", ("END",), "one ", "stop"),
        ("one EN", ("END",), "one EN", "end"),
        ("one ENEND", ("END",), "one EN", "stop"),
        ("a\nb\n", ("x", "\n"), "a", "stop"),
        ("ENDE", ("END",), "", "stop"),
        ("", ("END",), "", "end"),
        ("aé!", (), "aé!", "end"),
    ],
)
def test_an_answer_ends_before_a_stop_text(text, stop, says, why):
    said, shown = answer(text, Sampling(99, stop=stop))
    assert not any("\ufffd" in part for part in shown)  # half a character is not shown
    assert (said.text, said.stopped, "".join(shown)) == (says, why, says)
    assert answer(text, Sampling(99, stop=stop), is_shown=False)[0] == said


@pytest.mark.parametrize("named, ends", [([7, 9], {7, 9}), (7, {7}), (None, set())])
def test_generation_config_names_ends(tmp_path, named, ends):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert end_token_ids(ByteTokenizer(), tmp_path) == ENDS | ends
    assert end_token_ids(ByteTokenizer(), tmp_path / "other") == ENDS
