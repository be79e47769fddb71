"""What a cut leaves of samples, by a plain walk over their tokens, and what asks for most."""

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.record_table import build_table
from dflop_jax.data.media.counts import fit_samples, largest_rows, sample_load
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.tiles import SimpleTiles
from dflop_jax.data.text.tokenize import ANSWER_TOKENS, TokenRun, count_text_tokens, truncate_runs
from tests.data.views import prepared

MAX_TOKENS = 100
HOW = prepared(SimpleTiles(8, 3), MelSpec(), 8, ((7, 7),) * 7)


def conversation(rng):
    """Runs of text with clips and sounds anywhere, in any order; the headers of these."""
    lengths = rng.integers(0, 60, rng.integers(2, 8))
    pieces = [TokenRun((5,) * n, bool(k % 2)) for k, n in enumerate(lengths.tolist())]
    n_media = rng.integers(0, 5)
    for k in rng.permutation(n_media).tolist():
        pieces.insert(rng.integers(len(pieces) + 1), TokenRun(medium=k))
    headers = [
        {"kind": 1, "frames": int(rng.integers(1, 9))}
        if rng.random() < 0.7
        else {"kind": 2, "samples": int(rng.integers(2000, 20_000))}
        for _ in range(n_media)
    ]
    return pieces, headers


def tokens_of(header):
    module, kind = ("vision", "video") if header["kind"] == 1 else ("audio", "audio")
    columns = {name: np.array([value]) for name, value in header.items() if name != "kind"}
    counted = HOW[module].count(kind, columns, np.ones(1, bool))
    return int((counted.tokens + counted.between)[0])


def walked(pieces, sizes):
    """(text tokens, media) that stay, and whether enough of the first answer does."""
    n, text, media, needed, in_answer = 0, 0, [], 0, 0
    first = next((k for k, p in enumerate(pieces) if p.supervised), len(pieces))
    for k, p in enumerate(pieces):
        if p.medium >= 0:
            continue
        in_answer = k >= first and (in_answer or k == first) and p.supervised
        needed += len(p.ids) if k < first or in_answer else 0
    prompt = sum(len(p.ids) for p in pieces[:first])
    for p in pieces:
        if p.medium < 0:
            part = min(len(p.ids), MAX_TOKENS - n)
            n, text = n + part, text + part
        elif n + sizes[p.medium] > MAX_TOKENS:
            break
        else:
            n += sizes[p.medium]
            media.append(p.medium)
    return text, media, text >= min(needed, prompt + ANSWER_TOKENS)


@pytest.mark.parametrize("oversize", ["truncate", "drop"])
@pytest.mark.parametrize("n", [0, 1, 400])
def test_a_cut_sample_is_its_first_tokens(n, oversize):
    rng = np.random.default_rng(n)
    made = [conversation(rng) for _ in range(n)]
    columns = [count_text_tokens(pieces) for pieces, _ in made]
    headers = [[h | place for h, place in zip(of, places, strict=True)]
               for (_, of), (_, places) in zip(made, columns, strict=True)]  # fmt: skip
    table = build_table([record for record, _ in columns], headers)
    counts, fits = fit_samples(table, HOW, DataConfig(max_tokens=MAX_TOKENS, oversize=oversize))
    assert len(counts) == len(fits) == n
    n_cut = 0
    for i, (pieces, of) in enumerate(made):
        sizes = [tokens_of(header) for header in of]
        total = sum(len(p.ids) for p in pieces) + sum(sizes)
        if oversize == "drop":
            assert (counts.all_tokens[i], fits[i]) == (total, total <= MAX_TOKENS)
            continue
        text, media, enough = walked(pieces, sizes)
        assert (counts.text_tokens[i], counts.n_media[i]) == (text, len(media))
        assert fits[i] == enough
        first = truncate_runs(pieces, text + len(media))
        assert [p.medium for p in first if p.medium >= 0] == media
        assert sum(len(p.ids) for p in first) == text
        load = sample_load(table, i, HOW, counts.select(slice(i, i + 1)))
        assert load.tokens("llm") == text + sum(sizes[k] for k in media) <= MAX_TOKENS
        frames = sum(of[k]["frames"] for k in media if of[k]["kind"] == 1)
        assert len(load.lengths("vision")) == frames
        n_cut += enough and len(media) < len(of)
    assert n < 400 or oversize == "drop" or n_cut > 40


def test_the_most_demanding_ask_for_all_that_any_does():
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 30, 200):
        asks = rng.integers(0, 6, (n, 3)) * rng.integers(0, 2, (n, 3))
        chosen = largest_rows(asks, 1000)
        for row in asks:
            assert any((asks[k] >= row).all() for k in chosen)
        for k in chosen:  # none for nothing
            assert not any((asks[j] >= asks[k]).all() for j in chosen if j != k)
        assert largest_rows(asks, 2) == chosen[:2]
