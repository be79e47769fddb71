"""What lay_out promises, assemble keeps; oversize samples follow the policy."""

import numpy as np
import pytest

from dflop_jax.data.datasets.layout import Header, OversizeError, assemble, lay_out
from dflop_jax.data.sample import Limits, MediaSpec
from dflop_jax.data.text.pieces import ByteTokenizer, chat_pieces

SPEC = MediaSpec(8, 3)
TOKENIZER = ByteTokenizer()


def tiles_of(layout):
    """Tiles that carry their medium and place, so that nothing can be confused."""
    return [np.full((n, 8, 8, 3), 1 + m, np.uint8) for m, n in enumerate(layout.tiles)]


@pytest.mark.parametrize("max_tokens", [30, 60, 80, 100, 150, 1000])
@pytest.mark.parametrize("n_media", [0, 1, 3])
def test_truncation(max_tokens, n_media):
    media = [Header(24, 24), Header(0, 0, 12), Header(64, 8)][:n_media]
    text = "".join("<image>" if not m.frames else "<video>" for m in media) + "what?"
    pieces = chat_pieces([("human", text), ("gpt", "an answer of some length " * 4)], TOKENIZER)
    full = lay_out(pieces, media, SPEC, Limits(max_tokens=10**6))
    assert full.tiles == (10, 12, 9)[:n_media]
    limits = Limits(max_tokens=max_tokens)
    needed = len("user\nwhat?\nassistant\n") + 3 + 32
    if needed + 3 * n_media > max_tokens:
        with pytest.raises(OversizeError, match="max_tokens"):
            lay_out(pieces, media, SPEC, limits)
        return
    layout = lay_out(pieces, media, SPEC, limits)
    sample = assemble(pieces, layout, tiles_of(layout), SPEC, TOKENIZER.visual_id)
    assert sample.shape == layout.shape
    assert layout.shape.llm_tokens == min(full.shape.llm_tokens, len(sample.tokens))
    assert len(sample.tokens) <= max_tokens
    assert all(1 <= n <= f for n, f in zip(layout.tiles, full.tiles, strict=True))
    assert sample.supervised.sum() >= 32
    assert not sample.supervised[sample.visual.used].any()
    # every visual token once, in order, and the kept text is the front of the whole text
    assert sample.visual.index[sample.visual.used, 0].tolist() == list(range(3 * len(sample.tiles)))
    whole = [i for p in pieces for i in p.ids]
    kept = sample.tokens[~sample.visual.used].tolist()
    assert kept == whole[: len(kept)]
    # nothing more than needed is cut
    if full.shape.llm_tokens <= max_tokens:
        assert layout == full
    else:
        assert len(sample.tokens) == max_tokens or layout.tiles != full.tiles


@pytest.mark.parametrize("oversize", ["drop", "error"])
def test_refusal(oversize):
    pieces = chat_pieces([("human", "q"), ("gpt", "a" * 100)], TOKENIZER)
    with pytest.raises(OversizeError, match="max_tokens=50"):
        lay_out(pieces, [], SPEC, Limits(max_tokens=50, oversize=oversize))
    assert lay_out(pieces, [], SPEC, Limits(oversize=oversize)).shape.llm_tokens < 200


def test_tiles_unlike_the_header_are_refused():
    pieces = chat_pieces([("human", "<image>"), ("gpt", "a")], TOKENIZER)
    layout = lay_out(pieces, [Header(8, 8)], SPEC, Limits())
    with pytest.raises(ValueError, match="promised"):
        assemble(pieces, layout, [np.zeros((2, 8, 8, 3), np.uint8)], SPEC, 0)
