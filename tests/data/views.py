"""What a model takes, and what a sample holds, by the names that tests call it."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from dflop_jax.data import MediaSpec
from dflop_jax.data.media.mel import MelMedium
from dflop_jax.data.media.tiles import TileMedium


def media_spec(tile_px=0, tokens_per_tile=0, form="tiles", sources=1, sound=None):
    """What a model of tiles (none: tile_px = 0), of sound or of both asks of media."""
    seen = {"form": form, "tile_px": tile_px, "tokens_per_tile": tokens_per_tile}
    media = {"vision": {**seen, "sources": sources}} if tile_px else {}
    return MediaSpec.of({**media, **({"audio": asdict(sound)} if sound else {})}, {})


def prepared(layout=None, sound=None, max_frames=32, between_frames=()):
    """How media are taken: tiles of a layout, sound, or both."""
    seen = TileMedium(layout, 4, 0, max_frames, between_frames) if layout else None
    media = {"vision": seen, "audio": MelMedium(sound) if sound else None}
    return {module: medium for module, medium in media.items() if medium}


def tokens(sample):
    return sample.fields["llm"]["tokens"]


def supervised(sample):
    """bool [t]: which tokens are to be predicted; weights stand one before them."""
    weights = sample.fields["llm"]["weights"] > 0
    assert not weights[-1:].any()
    return np.concatenate([np.zeros(len(weights[:1]), bool), weights[:-1]])


def tiles(sample):
    """uint8 [n, px, px, 3], n = 0 without any."""
    return sample.fields.get("vision", {}).get("pixels", np.zeros((0, 1, 1, 3), np.uint8))


def mel(sample):
    return sample.fields.get("audio", {}).get("mel", np.zeros((0, 1, 1), np.float32))


def mel_frames(sample):
    return sample.fields.get("audio", {}).get("mel_frames", np.zeros(0, np.int32))


def seen(sample):
    """int [t, K]: features of tiles that each token comes from, -1 for none."""
    places = sample.gathers.get(("vision", "llm"))
    return np.full((len(tokens(sample)), 1), -1) if places is None else places.index


def from_pictures(sample):
    """bool [t]: tokens that come from patches."""
    return (seen(sample) >= 0).any(1)


def n_tiles(load):
    return len(load.lengths("vision"))


def llm_tokens(load):
    return load.tokens("llm")
