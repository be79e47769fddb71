"""One question, with a picture or without, as the arrays that the model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample, pack_group
from dflop_jax.data.datasets.compose import compose
from dflop_jax.data.datasets.mixture_samples import preprocessing
from dflop_jax.data.media.decode import Pictures
from dflop_jax.data.media.tiling import read_upright
from dflop_jax.data.sample import Limits
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import TAG, Tokenizer, chat_pieces
from dflop_jax.records import Bucket, Microbatch

IMAGE = "<image>"


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A prompt as one row padded to `t` tokens, its tiles padded to a power of two.

    fields: of the LLM's entry and layers, [1, t]; `length` of the tokens are no padding.
    pixels: uint8 [n, px, px, 3], no tile without a picture; `tiles` of them are no padding.
    sources: where visual tokens come from (`PackedGroup.sources`), [1, t, sources] each; empty
      without a picture.
    """

    fields: dict[str, np.ndarray]
    pixels: np.ndarray
    sources: tuple[np.ndarray, ...]
    length: int
    tiles: int


def prompt_row(sample: Sample, spec: MediaSpec, token_multiple: int) -> PromptRow:
    """The row of a sample, its tokens padded to a multiple."""
    length, n = len(sample.tokens), len(sample.tiles)
    bucket = Bucket(
        tiles=1 << (n - 1).bit_length() if n else 0,
        tokens=-(-length // token_multiple) * token_multiple,
    )
    packed = pack_group(
        [Microbatch(0, (((0,),),))],
        bucket,
        [sample],
        shapes=[sample.shape],
        data_ranks={"vision": 1, "llm": 1} if spec.tile_px else {"llm": 1},
        spec=spec,
    )
    fields = {name: array[0] for name, array in packed.fields["llm"].items()}
    pixels = packed.fields["vision"]["pixels"][0] if n else sample.tiles
    sources = tuple(a[0] for a in packed.sources.get("vision", ()))
    return PromptRow(fields, pixels, sources, length, n)


def prompt_sample(
    prompt: str,
    image: str | Path | None,
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: Tokenizer | ChatTokenizer,
) -> Sample:
    """The turn of a user up to where the answer begins, prepared as in training.

    The picture stands where the prompt says <image>, before it where it does not.

    Raises:
      ValueError: an empty prompt, tags unlike the picture, a model that sees no pictures, a file
        that is no picture, or more tokens than `data.max_tokens`.
    """
    text = tagged(prompt, image)
    if isinstance(tokenizer, ChatTokenizer):
        pieces = tokenizer.question_pieces(text)
    else:  # without the end of the empty answer
        pieces = chat_pieces([("human", text), ("gpt", "")], tokenizer)[:-1]
    spec = MediaSpec.of(model.preprocessing)
    limits = Limits(data.max_tiles, data.max_frames, data.max_tokens)
    how = preprocessing(spec, limits)
    media = []
    if image is not None:
        if how.vision is None:
            raise ValueError("the model sees no pictures; leave out --image")
        picture = read_upright(_file(image))
        media = [Pictures(how.vision.cut(picture, True), how.vision.place(*picture.size, True))]
    sample = compose(pieces, media, spec, placeholder=tokenizer.visual_id)
    if len(sample.tokens) > data.max_tokens:
        seen = sum(len(m.tokens) for m in media)
        visual = f" (of the picture {seen})" if media else ""
        raise ValueError(
            f"the prompt's {len(sample.tokens)} tokens{visual} exceed data.max_tokens="
            f"{data.max_tokens}; shorten it, lower --data.max_tiles or raise --data.max_tokens"
        )
    return sample


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
