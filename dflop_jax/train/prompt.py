"""One question, with a picture or without, as the arrays that the model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data.layout import Header, OversizeError, assemble, lay_out
from dflop_jax.data.sample import Limits, Sample, VisionSpec
from dflop_jax.data.text import TAG, Tokenizer, chat_pieces
from dflop_jax.data.tiling import picture_size, read_picture

IMAGE = "<image>"


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A prompt as one row padded to `t` tokens, its tiles padded to `n`.

    fields: of the LLM's entry and layers, [1, t]; `length` of the tokens are no padding.
    pixels: uint8 [n, px, px, 3], no tile without a picture; `tiles` of them are no padding.
    visual_index: int32 [1, t], index into the encoder's output flattened to [n * tokens_per_tile],
      or -1 where the token is text or padding.
    """

    fields: dict[str, np.ndarray]
    pixels: np.ndarray
    visual_index: np.ndarray
    length: int
    tiles: int


def prompt_row(sample: Sample, token_multiple: int) -> PromptRow:
    """The row of a sample: tokens padded to a multiple, tiles to a power of two."""
    length, n_tiles = len(sample.tokens), len(sample.tiles)
    row = np.zeros(-(-length // token_multiple) * token_multiple, np.int32)
    tokens, segments, index = row.copy(), row.copy(), row - 1
    tokens[:length], segments[:length], index[:length] = sample.tokens, 1, sample.visual
    padding = (1 << (n_tiles - 1).bit_length()) - n_tiles if n_tiles else 0
    fields = {
        "tokens": tokens[None],
        "segment_ids": segments[None],
        "positions": np.arange(len(row), dtype=np.int32)[None],
        "is_visual": index[None] >= 0,
    }
    pixels = np.pad(sample.tiles, ((0, padding), (0, 0), (0, 0), (0, 0)))
    return PromptRow(fields, pixels, index[None], length, n_tiles)


def prompt_sample(
    prompt: str,
    image: str | Path | None,
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: Tokenizer,
) -> Sample:
    """The turn of a user up to where the answer begins, tiled and laid out as in training.

    The picture stands where the prompt says <image>, before it where it does not.

    Raises:
      ValueError: an empty prompt, tags unlike the picture, a model that sees no pictures, a file
        that is no picture, or more tokens than `data.max_tokens`.
    """
    turns = [("human", tagged(prompt, image)), ("gpt", "")]
    pieces = chat_pieces(turns, tokenizer)[:-1]  # without the end of the empty answer
    sees = "vision" in model.modules
    if image is not None and not sees:
        raise ValueError("the model sees no pictures; leave out --image")
    spec = VisionSpec(model.tile_px, model.tokens_per_tile) if sees else VisionSpec(1, 1)
    media = [] if image is None else [Header(*picture_size(_file(image)))]
    limits = Limits(data.max_tiles, data.max_frames, data.max_tokens, "truncate")
    try:
        layout = lay_out(pieces, media, spec, limits)
    except OversizeError:
        n = sum(len(p.ids) for p in pieces)
        tile = f" and {spec.tokens_per_tile} of the picture" if media else ""
        raise ValueError(
            f"the prompt's {n} tokens{tile} exceed data.max_tokens={data.max_tokens}; shorten it, "
            "or raise --data.max_tokens"
        ) from None
    tiles = []
    if image is not None:
        most = min(data.max_tiles, layout.cap - 1)
        tiles = [read_picture(_file(image), spec.tile_px, most)]
    return assemble(pieces, layout, tiles, spec, tokenizer.visual_id)


def tagged(prompt: str, image: str | Path | None) -> str:
    """The prompt with exactly one <image> if there is a picture; ValueError if that cannot be."""
    tags = TAG.findall(prompt)
    if not TAG.sub("", prompt).strip():
        raise ValueError("the prompt is empty; ask something with --prompt TEXT")
    if image is not None and not tags:
        return f"{IMAGE}\n{prompt}"
    if tags != [IMAGE] * (image is not None):
        needed = "one <image> at most" if image is not None else "no tag without --image"
        raise ValueError(f"the prompt says {' '.join(tags)}; it may have {needed}")
    return prompt


def _file(image: str | Path) -> Path:
    path = Path(image)
    if not path.is_file():
        raise ValueError(f"{path}: no such picture; check --image")
    return path
