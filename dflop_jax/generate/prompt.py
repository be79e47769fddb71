"""One question, with media or without, as the sample that the model was trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_table import RecordTable, build_table
from dflop_jax.data.datasets.row_reader import read_header
from dflop_jax.data.media.compose import DecodedMedia, compose, decode_media
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.kind import Kind, Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.medium import Preparation, module_of
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import Tokenizer, encode_chatml
from dflop_jax.generate.row import LLM

# Files by kind (image, video, audio, a model's own), each in the order of its tags.
Media = Mapping[str, Sequence[str | Path]]
NO_MEDIA: Media = MappingProxyType({})


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
      ValueError: an empty prompt, tags unlike the media, media that the model does not take, no
        such file, media that are broken or too small, or more tokens than `data.max_tokens`.
    """
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    kinds, how = spec.kinds, spec.prepared(Limits.of(data), tokenizer)
    text = tagged(prompt, {kind: len(files) for kind, files in media.items()}, kinds)
    files = {k.name: iter([_file(k, f) for f in media.get(k.name, ())]) for k in kinds}
    ordered = tuple((kind, next(files[kind])) for kind in tag_of(kinds).findall(text))
    for name, where in ordered:
        kind = next(k for k in kinds if k.name == name)
        if not module_of(how, name):
            raise ValueError(f"the model {kind.verb} no {kind.noun}s; leave out {where}")
    decoded = _decoded(ordered, how, kinds)
    if isinstance(tokenizer, ChatTokenizer):
        pieces = tokenizer.encode_question(text)
    else:  # without the end of the empty answer
        pieces = encode_chatml([("human", text), ("gpt", "")], tokenizer, tag_of(kinds))[:-1]
    sample = compose(pieces, decoded, how, placeholder=tokenizer.placeholder_id)
    n_tokens = sample.load.tokens(LLM)
    if n_tokens > data.max_tokens:
        of_media = int((sample.fields[LLM]["is_visual"] | sample.fields[LLM]["is_newline"]).sum())
        raise ValueError(
            f"the prompt's {n_tokens} tokens{f' (of media {of_media})' if ordered else ''} "
            f"exceed data.max_tokens={data.max_tokens}; shorten it, lower --data.max_tiles or "
            "raise --data.max_tokens"
        )
    return sample


def tagged(prompt: str, counts: Mapping[str, int], kinds: Kinds = BUILT_IN) -> str:
    """Return the prompt with a tag for each of its media, of which there are `counts` by kind;
    ValueError if that cannot be."""
    tag = tag_of(kinds)
    if not tag.sub("", prompt).strip():
        raise ValueError("the prompt is empty; ask something with --prompt TEXT")
    wanted = {kind.name: counts[kind.name] for kind in kinds if counts.get(kind.name)}
    said = tag.findall(prompt)
    if wanted and not said:
        return "".join(f"<{kind}>" * n for kind, n in wanted.items()) + f"\n{prompt}"
    if Counter(said) != wanted:
        each = " and ".join(
            f"one <{kind.name}> for each of {wanted[kind.name]} {kind.noun}s"
            for kind in kinds
            if kind.name in wanted
        )
        needed = f"{each}, or no tag" if wanted else "no tag without --image, --video or --audio"
        tags = " ".join(f"<{kind}>" for kind in said)
        raise ValueError(f"the prompt says {tags}; it may have {needed}")
    return prompt


def check_media(media: Media) -> None:
    """Read the headers of files by kind; ValueError: no such file, or one that is none of its kind.

    So a mistake shows before a model is loaded.
    """
    for kind in BUILT_IN:
        for file in media.get(kind.name, ()):
            path = _file(kind, file)
            with _readable():
                read_header(kind.name, path)


def _file(kind: Kind, file: str | Path) -> Path:
    path = Path(file)
    if not path.is_file():
        what = f"is a folder, no {kind.noun}" if path.is_dir() else f"no such {kind.noun}"
        raise ValueError(f"{path}: {what}; check --{kind.name}")
    return path


def _decoded(
    media: tuple[tuple[str, MediaFile], ...], how: Preparation, kinds: Kinds
) -> DecodedMedia:
    """Return the media as training prepares them; ValueError: one is broken, or the model cannot
    take it."""
    with _readable():
        table = _table(media, kinds)
    if not sample_counts(table, how)[1].all():
        alone = ((m, sample_counts(_table((m,), kinds), how)[1].all()) for m in media)
        kind, path = next((m for m, usable in alone if not usable), media[0])
        why = next(k.too_small for k in kinds if k.name == kind)
        raise ValueError(f"{path}: the model cannot take {why}; leave it out")
    with _readable():
        return decode_media(Record("the prompt", (), media), table, 0, how)


@contextmanager
def _readable() -> Iterator[None]:
    """ValueError with what to do about a file that cannot be read."""
    try:
        yield
    except ValueError as e:
        raise ValueError(
            f"{e}; save it anew in a common format (PNG, MP4, WAV), or give another file"
        ) from None


def _table(media: Sequence[tuple[str, MediaFile]], kinds: Kinds) -> RecordTable:
    """Return the headers of media as those of one record."""
    return build_table([{}], [[read_header(*medium, kinds) for medium in media]], kinds)
