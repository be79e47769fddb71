"""Prepare one prompt, with or without media, as a sample in the format of training."""

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
from dflop_jax.data.datasets.index_build import read_header
from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_table import RecordTable, build_table
from dflop_jax.data.media.compose import DecodedMedia, compose_sample, decode_media
from dflop_jax.data.media.counts import sample_counts
from dflop_jax.data.media.kind import BUILT_IN, Kind, Kinds, tag_of
from dflop_jax.data.media.medium import Preparation, module_of
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer
from dflop_jax.data.text.tokenize import encode_chatml
from dflop_jax.generate.row import LLM

# Files by media kind (image, video, audio or one of the model), in the order of the prompt's tags.
Media = Mapping[str, Sequence[str | Path]]
NO_MEDIA: Media = MappingProxyType({})


def prompt_sample(
    prompt: str, media: Media, data: DataConfig, model: MultimodalModel, tokenizer: AnyTokenizer
) -> Sample:
    """Return the user's turn up to the start of the answer, prepared as in training.

    Media replace the tags <image>, <video> and <audio>; without tags they precede the prompt.

    Raises:
      ValueError: the prompt is empty or exceeds `data.max_tokens`, its tags do not match the media,
        or media are missing, broken, too small or of a kind that the model does not accept.
    """
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    kinds, preparation = spec.kinds, spec.prepared(data, tokenizer)
    text = add_tags(prompt, {kind: len(files) for kind, files in media.items()}, kinds)
    files = {k.name: iter([_check_file(k, f) for f in media.get(k.name, ())]) for k in kinds}
    ordered = tuple((kind, next(files[kind])) for kind in tag_of(kinds).findall(text))
    for name, file in ordered:
        kind = next(k for k in kinds if k.name == name)
        if not module_of(preparation, name):
            raise ValueError(f"the model {kind.verb} no {kind.noun}s; leave out {file}")
    decoded = _decode_media(ordered, preparation, kinds)
    if isinstance(tokenizer, ChatTokenizer):
        pieces = tokenizer.encode_question(text)
    else:  # without the end of the empty answer
        pieces = encode_chatml([("human", text), ("gpt", "")], tokenizer, tag_of(kinds))[:-1]
    sample = compose_sample(pieces, decoded, preparation, placeholder=tokenizer.placeholder_id)
    n_tokens = sample.load.tokens(LLM)
    if n_tokens > data.max_tokens:
        of_media = int((sample.fields[LLM]["is_visual"] | sample.fields[LLM]["is_newline"]).sum())
        raise ValueError(
            f"the prompt's {n_tokens} tokens{f' (of media {of_media})' if ordered else ''} "
            f"exceed data.max_tokens={data.max_tokens}; shorten it, lower --data.max_tiles or "
            "raise --data.max_tokens"
        )
    return sample


def add_tags(prompt: str, counts: Mapping[str, int], kinds: Kinds = BUILT_IN) -> str:
    """Return the prompt with one tag per medium; `counts` are the numbers of media by kind.
    ValueError: the prompt is empty, or its own tags do not match `counts`."""
    tag = tag_of(kinds)
    if not tag.sub("", prompt).strip():
        raise ValueError("the prompt is empty; give one with --prompt TEXT")
    expected = {kind.name: counts[kind.name] for kind in kinds if counts.get(kind.name)}
    tags_in_prompt = tag.findall(prompt)
    if expected and not tags_in_prompt:
        return "".join(f"<{kind}>" * n for kind, n in expected.items()) + f"\n{prompt}"
    if Counter(tags_in_prompt) != expected:
        each = " and ".join(
            f"one <{kind.name}> for each of {expected[kind.name]} {kind.noun}s"
            for kind in kinds
            if kind.name in expected
        )
        needed = f"{each}, or no tag" if expected else "no tag without --image, --video or --audio"
        tags = " ".join(f"<{kind}>" for kind in tags_in_prompt)
        raise ValueError(f"the prompt says {tags}; it may have {needed}")
    return prompt


def check_media(media: Media) -> None:
    """Read the headers of files by kind, to report errors before a model is loaded."""
    for kind in BUILT_IN:
        for file in media.get(kind.name, ()):
            path = _check_file(kind, file)
            with _explain_unreadable():
                read_header(kind.name, path)


def _check_file(kind: Kind, file: str | Path) -> Path:
    path = Path(file)
    if not path.is_file():
        problem = f"is a folder, no {kind.noun}" if path.is_dir() else f"no such {kind.noun}"
        raise ValueError(f"{path}: {problem}; check --{kind.name}")
    return path


def _decode_media(
    media: tuple[tuple[str, MediaFile], ...], preparation: Preparation, kinds: Kinds
) -> DecodedMedia:
    """Decode media as training does; ValueError: one is broken or unusable for the model."""
    with _explain_unreadable():
        table = _header_table(media, kinds)
    if not sample_counts(table, preparation)[1].all():
        tables = ((m, _header_table((m,), kinds)) for m in media)
        unusable = (m for m, alone in tables if not sample_counts(alone, preparation)[1].all())
        kind, path = next(unusable, media[0])
        reason = next(k.too_small for k in kinds if k.name == kind)
        raise ValueError(f"{path}: the model cannot take {reason}; leave it out")
    with _explain_unreadable():
        return decode_media(Record("the prompt", (), media), table, 0, preparation)


@contextmanager
def _explain_unreadable() -> Iterator[None]:
    """Add advice to the ValueError of a file that cannot be read."""
    try:
        yield
    except ValueError as e:
        raise ValueError(
            f"{e}; save it again in a common format (PNG, MP4, WAV), or give another file"
        ) from None


def _header_table(media: Sequence[tuple[str, MediaFile]], kinds: Kinds) -> RecordTable:
    """Return a table of one record with the headers of these media."""
    return build_table([{}], [[read_header(*medium, kinds) for medium in media]], kinds)
