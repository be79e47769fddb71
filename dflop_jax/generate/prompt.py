"""One question, with media or without, as the sample that the model was trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.datasets.blob import Medium
from dflop_jax.data.datasets.compose import compose
from dflop_jax.data.datasets.counts import Preprocessing, sample_counts
from dflop_jax.data.datasets.fitting import preprocessing
from dflop_jax.data.datasets.header_rows import header
from dflop_jax.data.datasets.llava_records import KINDS, Record
from dflop_jax.data.datasets.shape_index import RECORDS, ShapeTable, table_of
from dflop_jax.data.media.decode import DecodedMedium, decode_media
from dflop_jax.data.sample import Limits
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.pieces import OMNI_TAG, Tokenizer, chat_pieces
from dflop_jax.data.text.stamps import stamp_of
from dflop_jax.generate.row import LLM

# Files by kind (image, video, audio), each in the order of its tags.
Media = Mapping[str, Sequence[str | Path]]
NO_MEDIA: Media = MappingProxyType({})
WORDS = {"image": "picture", "video": "clip", "audio": "sound"}


def prompt_sample(
    prompt: str,
    media: Media,
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: Tokenizer | ChatTokenizer,
) -> Sample:
    """Return the turn of a user up to where the answer begins, prepared as in training.

    Media stand where the prompt says <image>, <video> or <audio>, before it where it says none.

    Raises:
      ValueError: an empty prompt, tags unlike the media, media that the model does not take, a file
        that is none or too small, or more tokens than `data.max_tokens`.
    """
    text = tagged(prompt, {kind: len(files) for kind, files in media.items()})
    spec, limits = MediaSpec.of(model.preprocessing, model.piece_tokens), Limits.of(data)
    between: tuple[tuple[int, ...], ...] = ()
    if isinstance(tokenizer, ChatTokenizer):
        between = tokenizer.between_frames(limits.max_frames)
    how = preprocessing(spec, limits, between, stamp_of(tokenizer))
    files = {kind: iter([_file(kind, f, how) for f in media.get(kind, ())]) for kind in KINDS}
    ordered = tuple((kind, next(files[kind])) for kind in _kinds(text))
    decoded = _decoded(ordered, how)
    if isinstance(tokenizer, ChatTokenizer):
        pieces = tokenizer.question_pieces(text)
    else:  # without the end of the empty answer
        pieces = chat_pieces([("human", text), ("gpt", "")], tokenizer, OMNI_TAG)[:-1]
    sample = compose(pieces, decoded, spec, placeholder=tokenizer.visual_id)
    n_tokens = sample.load.tokens(LLM)
    if n_tokens > data.max_tokens:
        of_media = int((sample.fields[LLM]["is_visual"] | sample.fields[LLM]["is_newline"]).sum())
        raise ValueError(
            f"the prompt's {n_tokens} tokens{f' (of media {of_media})' if ordered else ''} exceed "
            f"data.max_tokens={data.max_tokens}; shorten it, lower --data.max_tiles or raise "
            "--data.max_tokens"
        )
    return sample


def tagged(prompt: str, counts: Mapping[str, int]) -> str:
    """Return the prompt with a tag for each of its media, of which there are `counts` by kind;
    ValueError if that cannot be."""
    if not OMNI_TAG.sub("", prompt).strip():
        raise ValueError("the prompt is empty; ask something with --prompt TEXT")
    wanted = {kind: counts.get(kind, 0) for kind in KINDS if counts.get(kind)}
    said = _kinds(prompt)
    if wanted and not said:
        return "".join(f"<{kind}>" * n for kind, n in wanted.items()) + f"\n{prompt}"
    if Counter(said) != wanted:
        each = " and ".join(
            f"one <{kind}> for each of {n} {WORDS[kind]}s" for kind, n in wanted.items()
        )
        needed = f"{each}, or no tag" if wanted else "no tag without --image, --video or --audio"
        tags = " ".join(f"<{kind}>" for kind in said)
        raise ValueError(f"the prompt says {tags}; it may have {needed}")
    return prompt


def _kinds(text: str) -> list[str]:
    """Kinds of the tags of a text, in order."""
    return [tag[1:-1] for tag in re.findall(OMNI_TAG, text)]


def _file(kind: str, file: str | Path, how: Preprocessing) -> Path:
    word, path = WORDS[kind], Path(file)
    if (how.sound if kind == "audio" else how.vision) is None:
        verb = "hears" if kind == "audio" else "sees"
        raise ValueError(f"the model {verb} no {word}s; leave out --{kind}")
    if not path.is_file():
        raise ValueError(f"{path}: no such {word}; check --{kind}")
    return path


def _decoded(
    media: tuple[tuple[str, Medium], ...], how: Preprocessing
) -> tuple[DecodedMedium, ...]:
    """Return the media as training prepares them; ValueError: the model cannot take one."""
    table = _table(media)
    if not sample_counts(table, how)[1].all():
        alone = ((m, sample_counts(_table((m,)), how)[1].all()) for m in media)
        kind, path = next((m for m, usable in alone if not usable), media[0])
        why = {
            "image": "too thin a picture; crop it",
            "video": "too thin or too short a clip; crop it or take a longer one",
            "audio": "too short a sound; take a longer one",
        }
        raise ValueError(f"{path}: the model cannot take {why[kind]}")
    return decode_media(Record("the prompt", (), media), table, 0, how)


def _table(media: Sequence[tuple[str, Medium]]) -> ShapeTable:
    """Return the headers of media as those of one record."""
    return table_of([dict.fromkeys(RECORDS, 0)], [[header(*medium) for medium in media]])
