"""What a sample holds, by the names that tests call it."""

from __future__ import annotations

import numpy as np


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
    places = sample.places.get(("vision", "llm"))
    return np.full((len(tokens(sample)), 1), -1) if places is None else places.index


def heard(sample):
    """int [t]: the feature of a window that each token comes from, -1 for none."""
    places = sample.places.get(("audio", "llm"))
    return np.full(len(tokens(sample)), -1) if places is None else places.index[:, 0]


def from_pictures(sample):
    """bool [t]: tokens that come from patches."""
    return (seen(sample) >= 0).any(1)


def newlines(sample):
    return sample.fields["llm"]["is_newline"]


def n_tiles(load):
    return len(load.lengths("vision"))


def n_windows(load):
    return len(load.lengths("audio"))


def llm_tokens(load):
    return load.tokens("llm")
