"""One sample of text, pictures, clips and sound as arrays, exactly as large as its counts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    first_feature, first_window = _starts(media, spec)
    runs: list[_Run] = []
    for p in pieces:
        medium = media[p.medium] if p.medium >= 0 else None
        if medium is None:
            run = _text_run(p.ids[:room])
            room -= len(run.ids)
        elif isinstance(medium, Sound):
            run = _sound_run(medium, first_window[p.medium] * spec.features_per_piece("audio"))
        elif isinstance(medium, NativePictures):
            run = _native_run(medium, first_feature[p.medium])
        else:
            run = _tiled_run(medium, first_feature[p.medium])
        runs.append(run)
    supervised = [np.full(len(run.ids), p.supervised) for p, run in zip(pieces, runs, strict=True)]
    seen, heard = join([run.seen for run in runs]), _joined([run.heard for run in runs])
    ids = _joined([run.ids for run in runs])
    llm = _text_fields(np.where(ids >= 0, ids, placeholder), _joined(supervised).astype(bool))
    llm |= {"is_visual": seen.used | (heard >= 0), "is_newline": seen.newline}
    fields, places = {"llm": llm}, {}
    if spec.form == "native":
        llm["positions"] = _positions(seen.used, _in_text(pieces, media), spec.merge)
    seen_pieces, vision = _vision_fields(media, spec)
    if vision:
        fields["vision"], places["vision", "llm"] = vision, _seen_places(seen, spec.sources)
    n_windows, audio = _audio_fields(media, spec)
    if audio:
        fields["audio"] = audio
        places["audio", "llm"] = Places(heard[:, None].astype(np.int32))
    return Sample(fields, places, spec.load(seen_pieces, n_windows, len(heard)))


def blanked(sample: Sample) -> Sample:
    """Return the sample with every tile or patch grey."""
    vision = sample.fields.get("vision", {})
    grey = {name: np.full_like(vision[name], GREY) for name in PIXELS if name in vision}
    if not grey:
        return sample
    return replace(sample, fields={**sample.fields, "vision": {**vision, **grey}})


@dataclass(frozen=True, eq=False)
class _Run:
    """What stands in the text for a piece of it or for a medium: token `ids` int64 [t], -1 where
    something is seen or heard; where each token comes from in the encoders' features, and which of
    the features of sound it is, int64 [t], -1 for none."""

    ids: np.ndarray
    seen: TokenSources
    heard: np.ndarray


def _text_run(ids: Sequence[int]) -> _Run:
    none = np.full(len(ids), -1)
    return _Run(np.asarray(ids, np.int64), plain(none), none)


def _tiled_run(medium: Pictures, first_feature: int) -> _Run:
    """A picture or clip in tiles, with the text among its frames."""
    seen = medium.tokens.shifted(first_feature)
    none = np.full(len(seen), -1)
    return _Run(none if medium.text is None else medium.text, seen, none)


def _native_run(medium: NativePictures, first_feature: int) -> _Run:
    """A picture or clip at native resolution, with the time stamps of its pairs of frames."""
    stands = medium.text < 0
    seen = plain(np.where(stands, first_feature + np.cumsum(stands) - 1, -1))
    return _Run(medium.text, seen, np.full(len(stands), -1))


def _sound_run(medium: Sound, first_feature: int) -> _Run:
    none = np.full(medium.tokens, -1)
    return _Run(none, plain(none), first_feature + np.arange(medium.tokens))


def _vision_fields(
    media: Sequence[DecodedMedium], spec: MediaSpec
) -> tuple[int | list[int], dict[str, np.ndarray]]:
    """Return the tiles, or the patches of each piece, and the fields of "vision"; {} without."""
    if spec.form == "native":
        shown = [m for m in media if isinstance(m, NativePictures)]
        grids = [grid for m in shown for grid in m.grids]
        if not grids:
            return [], {}
        patches = np.concatenate([m.patches for m in shown])
        grid = patch_places(grids, spec.merge)
        return [rows * cols for rows, cols in grids], {"patches": patches, "grid": grid}
    pictures = [m for m in media if isinstance(m, Pictures)]
    if not (n_tiles := sum(len(m.tiles) for m in pictures)):
        return 0, {}
    return n_tiles, {"pixels": np.concatenate([m.tiles for m in pictures])}


def _audio_fields(
    media: Sequence[DecodedMedium], spec: MediaSpec
) -> tuple[int, dict[str, np.ndarray]]:
    """Return the windows of sound and the fields of "audio"; {} without."""
    sounds = [m for m in media if isinstance(m, Sound)]
    if not (n_windows := sum(len(m.mel) for m in sounds)):
        return 0, {}
    assert spec.sound is not None, "the model takes no sound"
    frames = np.concatenate([_window_frames(m, spec.sound) for m in sounds])
    mel = np.concatenate([m.mel for m in sounds])
    return n_windows, {"mel": mel, "mel_frames": frames.astype(np.int32)}


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the parts one after the other, int64 [0] without any."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _text_fields(tokens: np.ndarray, supervised: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens and, of each, the next one and whether it is to be predicted."""
    targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
    targets[:-1], weights[:-1] = tokens[1:], supervised[1:]
    return {"tokens": tokens.astype(np.int32), "targets": targets, "weights": weights}


def _seen_places(tokens: TokenSources, n_sources: int) -> Places:
    index = np.where(tokens.weight > 0, tokens.index, -1)
    return Places(index, tokens.weight) if n_sources > 1 else Places(index[:, :1])


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
