"""One sample of text, pictures, clips and sound as arrays, exactly as large as its counts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.data.media.decode import DecodedMedium, NativePictures, Pictures, Sound
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.native import Grid, patch_places, token_positions
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.media.token_sources import TokenSources, join, plain
from dflop_jax.data.sample import Places, Sample
from dflop_jax.data.text.pieces import Piece

GREY = 128
PIXELS = ("pixels", "patches")  # of tiles, and at native resolution


def compose(
    pieces: Sequence[Piece],
    media: Sequence[DecodedMedium],
    spec: MediaSpec,
    *,
    placeholder: int,
    text_tokens: int | None = None,
) -> Sample:
    """Return the sample of tokenized text and decoded media: fields of "llm" (tokens, targets,
    weights, is_visual, is_newline), "vision" (pixels) and "audio" (mel, mel_frames); at native
    resolution also positions of "llm", and "vision" has patches and grid.

    Args:
      placeholder: token id that stands where media are; any, since it is not embedded.
      text_tokens: text tokens kept, from the front; None: all.

    Raises:
      ValueError: pieces that name other media than there are.
    """
    if sorted(p.medium for p in pieces if p.medium >= 0) != list(range(len(media))):
        raise ValueError(f"the text does not place each of {len(media)} media once")
    room = sum(len(p.ids) for p in pieces) if text_tokens is None else text_tokens
    window_tokens = spec.features_per_piece("audio") if spec.sound else 0
    first_feature, first_window = _starts(media, spec)
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
            seen = medium.tokens.shifted(first_feature[p.medium])
            ids, heard = np.full(len(seen), placeholder), np.full(len(seen), -1)
            if medium.text is not None:
                ids = np.where(medium.text >= 0, medium.text, placeholder)
        elif isinstance(medium, NativePictures):
            stands = medium.text < 0
            seen = plain(np.where(stands, first_feature[p.medium] + np.cumsum(stands) - 1, -1))
            ids = np.where(stands, placeholder, medium.text)
            heard = np.full(len(ids), -1)
        else:
            heard = first_window[p.medium] * window_tokens + np.arange(medium.tokens)
            ids, seen = np.full(len(heard), placeholder), _text(len(heard))
        tokens.append(ids)
        supervised.append(np.full(len(ids), p.supervised))
        visual.append(seen)
        audio.append(heard)
    pictures = [m for m in media if isinstance(m, Pictures)]
    sounds = [m for m in media if isinstance(m, Sound)]
    seen, heard = join(visual), np.concatenate([np.zeros(0, np.int64), *audio])
    fields = {"llm": _text_fields(np.concatenate([np.zeros(0, np.int64), *tokens]),
                                  np.concatenate([np.zeros(0, bool), *supervised]))}  # fmt: skip
    fields["llm"] |= {"is_visual": seen.used | (heard >= 0), "is_newline": seen.newline}
    places = {}
    seen_pieces: int | list[int] = 0
    if spec.form == "native":
        shown = [m for m in media if isinstance(m, NativePictures)]
        grids = [grid for m in shown for grid in m.grids]
        seen_pieces = [rows * cols for rows, cols in grids]
        fields["llm"]["positions"] = _positions(seen.used, _in_text(pieces, media), spec.merge)
        if grids:
            patches = np.concatenate([m.patches for m in shown])
            fields["vision"] = {"patches": patches, "grid": patch_places(grids, spec.merge)}
            places["vision", "llm"] = _seen_places(seen, spec.sources)
    if n_tiles := sum(len(m.tiles) for m in pictures):
        seen_pieces = n_tiles
        fields["vision"] = {"pixels": np.concatenate([m.tiles for m in pictures])}
        places["vision", "llm"] = _seen_places(seen, spec.sources)
    if n_windows := sum(len(m.mel) for m in sounds):
        assert spec.sound is not None, "the model takes no sound"
        frames = np.concatenate([_window_frames(m, spec.sound) for m in sounds])
        mel = np.concatenate([m.mel for m in sounds])
        fields["audio"] = {"mel": mel, "mel_frames": frames.astype(np.int32)}
        places["audio", "llm"] = Places(heard[:, None].astype(np.int32))
    return Sample(fields, places, spec.load(seen_pieces, n_windows, len(heard)))


def blanked(sample: Sample) -> Sample:
    """Return the sample with every tile or patch grey."""
    vision = sample.fields.get("vision", {})
    grey = {name: np.full_like(vision[name], GREY) for name in PIXELS if name in vision}
    if not grey:
        return sample
    return replace(sample, fields={**sample.fields, "vision": {**vision, **grey}})


def _text_fields(tokens: np.ndarray, supervised: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens and, of each, the next one and whether it is to be predicted."""
    targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
    targets[:-1], weights[:-1] = tokens[1:], supervised[1:]
    return {"tokens": tokens.astype(np.int32), "targets": targets, "weights": weights}


def _seen_places(tokens: TokenSources, n_sources: int) -> Places:
    index = np.where(tokens.weight > 0, tokens.index, -1)
    return Places(index, tokens.weight) if n_sources > 1 else Places(index[:, :1])


def _text(n: int) -> TokenSources:
    """Tokens that are neither patches nor newlines."""
    return plain(np.full(n, -1))


def _starts(media: Sequence[DecodedMedium], spec: MediaSpec) -> tuple[list[int], list[int]]:
    """Return the first feature and the first window of each medium among those of the sample."""

    def features(m: DecodedMedium) -> int:
        if isinstance(m, NativePictures):
            return len(m.patches) // spec.merge**2
        return len(m.tiles) * spec.tokens_per_tile if isinstance(m, Pictures) else 0

    seen = np.cumsum([0, *map(features, media)])
    windows = np.cumsum([0, *(len(m.mel) if isinstance(m, Sound) else 0 for m in media)])
    return seen.tolist(), windows.tolist()


def _in_text(pieces: Sequence[Piece], media: Sequence[DecodedMedium]) -> list[Grid]:
    """Grids of the pieces at native resolution in the order in which they stand in the text."""
    ordered = [media[p.medium] for p in pieces if p.medium >= 0]
    return [grid for m in ordered if isinstance(m, NativePictures) for grid in m.grids]


def _positions(seen: np.ndarray, grids: Sequence[Grid], merge: int) -> np.ndarray:
    """int32 [t, 3], see `token_positions`; `seen` bool [t]: tokens that are blocks of the grids."""
    runs: list[int | Grid] = []
    blocks = iter((rows // merge, cols // merge) for rows, cols in grids)
    at = 0
    while at < len(seen):
        if seen[at]:
            rows, cols = next(blocks)
            runs.append((rows, cols))
            at += rows * cols
        else:
            after = np.flatnonzero(seen[at:])
            n = int(after[0]) if len(after) else len(seen) - at
            runs.append(n)
            at += n
    return token_positions(runs)


def _window_frames(sound: Sound, spec: MelSpec) -> np.ndarray:
    """Return the valid frames of each window of a sound: full ones, then the rest."""
    before = np.arange(len(sound.mel)) * spec.window_frames
    return np.minimum(sound.frames - before, spec.window_frames)
