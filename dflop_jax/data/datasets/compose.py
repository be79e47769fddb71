"""One sample of text, pictures, clips and sound as arrays, exactly as large as its costs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.data.datasets.costs import SampleCosts
from dflop_jax.data.datasets.layout import ANSWER_TOKENS
from dflop_jax.data.media.decode import Pictures, Sound
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.token_sources import TokenSources, join, plain
from dflop_jax.data.sample import MediaSpec, Sample
from dflop_jax.data.text.pieces import Piece


def fit_text(
    costs: SampleCosts, prompt_tokens: np.ndarray, max_tokens: int, *, truncate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(text tokens kept int64 [n], which samples fit bool [n]) under `max_tokens` LLM tokens.

    With `truncate`, text is cut from the end, media never: a sample fits when its media, its
    `prompt_tokens` and ANSWER_TOKENS of the answer (or all of a shorter one) do.
    """
    room = max_tokens - (costs.llm_tokens - costs.text_tokens)
    answer = np.minimum(costs.text_tokens - prompt_tokens, ANSWER_TOKENS)
    needed = prompt_tokens + answer if truncate else costs.text_tokens
    return np.minimum(costs.text_tokens, np.maximum(room, 0)), needed <= room


def compose(
    pieces: Sequence[Piece],
    media: Sequence[Pictures | Sound],
    spec: MediaSpec,
    *,
    placeholder: int,
    text_tokens: int | None = None,
) -> Sample:
    """The sample of tokenized text and decoded media.

    Args:
      placeholder: token id that stands where media are; any, since it is not embedded.
      text_tokens: text tokens kept, from the front; None: all.

    Raises:
      ValueError: pieces that name other media than there are.
    """
    if sorted(p.medium for p in pieces if p.medium >= 0) != list(range(len(media))):
        raise ValueError(f"the text does not place each of {len(media)} media once")
    room = sum(len(p.ids) for p in pieces) if text_tokens is None else text_tokens
    window_tokens = spec.features_per_item("audio") if spec.sound else 0
    first_tile, first_window = _starts(media)
    tokens: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    visual: list[TokenSources] = []
    audio: list[np.ndarray] = []
    for p in pieces:
        medium = media[p.medium] if p.medium >= 0 else None
        if medium is None:
            ids = np.asarray(p.ids[:room], np.int64)
            room -= len(ids)
            seen, heard = _text(len(ids)), np.full(len(ids), -1)
        elif isinstance(medium, Pictures):
            seen = medium.tokens.shifted(first_tile[p.medium] * spec.tokens_per_tile)
            ids, heard = np.full(len(seen), placeholder), np.full(len(seen), -1)
            if medium.text is not None:
                ids = np.where(medium.text >= 0, medium.text, placeholder)
        else:
            heard = first_window[p.medium] * window_tokens + np.arange(medium.tokens)
            ids, seen = np.full(len(heard), placeholder), _text(len(heard))
        tokens.append(ids)
        supervised.append(np.full(len(ids), p.supervised))
        visual.append(seen)
        audio.append(heard)
    pictures = [m for m in media if isinstance(m, Pictures)]
    no_tiles = np.zeros((0, spec.tile_px, spec.tile_px, 3), np.uint8)
    found = Sample(
        tokens=np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int32),
        supervised=np.concatenate([np.zeros(0, bool), *supervised]),
        tiles=np.concatenate([no_tiles, *(m.tiles for m in pictures)]),
        visual=join(visual),
        frames=sum(m.frames for m in pictures),
    )
    sounds = [m for m in media if isinstance(m, Sound)]
    if not sounds:
        return found
    assert spec.sound is not None, "the model takes no sound"
    frames = [_window_frames(m, spec.sound) for m in sounds]
    return replace(
        found,
        mel=np.concatenate([m.mel for m in sounds]),
        mel_frames=np.concatenate(frames).astype(np.int32),
        audio=np.concatenate(audio).astype(np.int32),
    )


def _text(n: int) -> TokenSources:
    """Tokens that are neither patches nor newlines."""
    return plain(np.full(n, -1))


def _starts(media: Sequence[Pictures | Sound]) -> tuple[list[int], list[int]]:
    """First tile and first window of each medium among those of the sample."""
    tiles = np.cumsum([0, *(len(m.tiles) if isinstance(m, Pictures) else 0 for m in media)])
    windows = np.cumsum([0, *(len(m.mel) if isinstance(m, Sound) else 0 for m in media)])
    return tiles.tolist(), windows.tolist()


def _window_frames(sound: Sound, spec: MelSpec) -> np.ndarray:
    """Valid frames of each window of a sound: full ones, then the rest."""
    before = np.arange(len(sound.mel)) * spec.window_frames
    return np.minimum(sound.frames - before, spec.window_frames)
