"""The kinds of media that every reader of records knows; a model's own join them."""

from __future__ import annotations

from dflop_jax.data.media.audio import AUDIO
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.video import VIDEO

BUILT_IN: Kinds = (IMAGE, VIDEO, AUDIO)
