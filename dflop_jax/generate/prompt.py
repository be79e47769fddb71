"""One question, with pictures or without, as the arrays that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.datasets.compose import compose
from dflop_jax.data.datasets.fitting import preprocessing
from dflop_jax.data.media.decode import NativePictures, Pictures, prepared
from dflop_jax.data.media.tiling import read_upright
from dflop_jax.data.packing import pack_group
from dflop_jax.data.sample import Limits
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import TAG, Tokenizer, chat_pieces
from dflop_jax.records import Bucket, Group, Plan, Schedule, SegmentPlan, Shape, SubmeshPlan

IMAGE = "<image>"
VISION, LLM = "vision", "llm"  # the modules that answer about a picture


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A prompt as one row padded to `t` tokens, its tiles padded to a power of two.

    Attributes:
      fields: of the LLM's entry and layers, [1, t]; `length` of the tokens are no padding.
      media: fields of the encoder, a tile a row; empty without a picture. `tiles` rows of them are
        no padding.
      places: where features stand (`PackedGroup.places`), [1, t, K] each; empty without a picture.
    """

    fields: dict[str, np.ndarray]
    media: dict[str, np.ndarray]
    places: tuple[np.ndarray, ...]
    length: int
    tiles: int


def prompt_row(sample: Sample, model: MultimodalModel, token_multiple: int) -> PromptRow:
    """Return the row of a sample, its tokens padded to a multiple."""
    length, tiles = sample.load.tokens(LLM), sample.load.lengths(VISION)
    n = len(tiles)
    row = Group(LLM, Shape(1, -(-length // token_multiple) * token_multiple), ((((0,),),),))
    groups: tuple[Group, ...] = (row,)
    if n:
        padded = 1 << (n - 1).bit_length()
        rows = tuple((k,) if k < n else () for k in range(padded))
        groups = (Group(VISION, Shape(padded, max(tiles)), ((rows,),), feeds=(1,)), row)
    plan, schedule = _whole(model, groups), Schedule(0, groups)
    packed = [
        pack_group(plan, schedule, g, [sample], [sample.load], model=model)
        for g in range(len(groups))
    ]
    fields, media = ({k: a[0] for k, a in p.fields.items()} for p in (packed[-1], packed[0]))
    places = tuple(a[0] for a in packed[-1].places.get(0, ())) if n else ()
    return PromptRow(fields, media if n else {}, places, length, n)


def _whole(model: MultimodalModel, groups: Sequence[Group]) -> Plan:
    """Return a plan of the whole model on one device, with the shapes of these groups."""
    segments = (
        SegmentPlan(name, name, 0, module.n_layers, "all", True, True)
        for name, module in model.modules.items()
    )
    return Plan(
        "prompt",
        (SubmeshPlan("all", 0, 1, 1, 1),),
        tuple(segments),
        (Bucket.of({g.module: g.shape for g in groups}),),
        edges_of(model),
    )


def prompt_sample(
    prompt: str,
    images: Sequence[str | Path],
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: Tokenizer | ChatTokenizer,
) -> Sample:
    """Return the turn of a user up to where the answer begins, prepared as in training.

    Pictures stand where the prompt says <image>, before it where it does not.

    Raises:
      ValueError: an empty prompt, tags unlike the pictures, a model that sees no pictures, a file
        that is no picture, or more tokens than `data.max_tokens`.
    """
    text = tagged(prompt, len(images))
    if isinstance(tokenizer, ChatTokenizer):
        pieces = tokenizer.question_pieces(text)
    else:  # without the end of the empty answer
        pieces = chat_pieces([("human", text), ("gpt", "")], tokenizer)[:-1]
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    limits = Limits.of(data)
    how = preprocessing(spec, limits)
    media: list[Pictures | NativePictures] = []
    for image in images:
        if how.vision is None:
            raise ValueError("the model sees no pictures; leave out --image")
        picture = read_upright(_file(image))
        media.append(prepared(picture, how.vision, alone=len(images) == 1))
    sample = compose(pieces, media, spec, placeholder=tokenizer.visual_id)
    n_tokens = sample.load.tokens(LLM)
    if n_tokens > data.max_tokens:
        seen = int(sample.fields[LLM]["is_visual"].sum() + sample.fields[LLM]["is_newline"].sum())
        visual = f" (of pictures {seen})" if media else ""
        raise ValueError(
            f"the prompt's {n_tokens} tokens{visual} exceed data.max_tokens="
            f"{data.max_tokens}; shorten it, lower --data.max_tiles or raise --data.max_tokens"
        )
    return sample


def tagged(prompt: str, n_images: int) -> str:
    """Return the prompt with one <image> for each picture; ValueError if that cannot be."""
    tags = TAG.findall(prompt)
    if not TAG.sub("", prompt).strip():
        raise ValueError("the prompt is empty; ask something with --prompt TEXT")
    if n_images and not tags:
        return f"{IMAGE * n_images}\n{prompt}"
    if tags != [IMAGE] * n_images:
        needed = "no tag without --image"
        if n_images:
            needed = f"one <image> for each of {n_images} pictures, or no tag"
        raise ValueError(f"the prompt says {' '.join(tags)}; it may have {needed}")
    return prompt


def _file(image: str | Path) -> Path:
    path = Path(image)
    if not path.is_file():
        raise ValueError(f"{path}: no such picture; check --image")
    return path
