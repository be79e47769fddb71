"""Compares samples as prepared here with those prepared by `transformers`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.build import RecordDataset
from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_table import IndexRow, build_table
from dflop_jax.data.media.audio import read_sound
from dflop_jax.data.media.compose import decode_media
from dflop_jax.data.media.kind import AUDIO, IMAGE, VIDEO
from dflop_jax.data.media.medium import DecodedMedium
from dflop_jax.data.media.pictures import read_picture
from dflop_jax.data.text.chat import ChatTokenizer

COMPARED_KINDS = {IMAGE.name: "pictures", AUDIO.name: "audio files"}
SOUND_TOLERANCE = 1e-3  # of log-mel features, which differ in summation order


def compare_preparations(
    dataset: RecordDataset, samples: Sequence[tuple[Record, IndexRow]], *, of_model: bool
) -> str:
    """Return a message: text, pixels and audio of the samples equal those of `transformers` with
    the files of the tokenizer's folder, or the first difference; "" without a folder. Only text is
    compared unless the folder is `of_model`."""
    tokenizer = dataset.tokenizer
    if not isinstance(tokenizer, ChatTokenizer):
        return ""
    counts, clips = dict.fromkeys(("texts", *COMPARED_KINDS.values()), 0), 0
    folder = tokenizer.folder.resolve()
    published = _load_pretrained(folder, "AutoTokenizer")
    for record, row in samples:
        messages, variables = tokenizer.messages(record.turns, record.fields)
        if tokenizer.render_text(messages, variables) != published.apply_chat_template(
            messages, chat_template=tokenizer.template, tokenize=False, **variables
        ):
            return f"{record.name}: its text differs from that of transformers"
        counts["texts"] += 1
        if not of_model:
            continue
        table = build_table([row.record], [row.media], dataset.spec.kinds)
        decoded = decode_media(record, table, 0, dataset.preparation)
        alone = sum(kind == IMAGE.name for kind, _ in record.media) == 1
        for number, (kind, source) in enumerate(record.media):
            clips += kind == VIDEO.name
            if kind not in COMPARED_KINDS or (kind == IMAGE.name and not alone):
                continue
            compare = _compare_sound if kind == AUDIO.name else _compare_picture
            try:
                difference = compare(folder, source, decoded[number][1])
            except Exception as e:  # processors may raise anything
                difference = f"transformers cannot prepare its {kind} ({one_line(e)[:120]})"
            if difference:
                return f"{record.name}: {difference}"
            counts[COMPARED_KINDS[kind]] += 1
    equal_counts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    return f"transformers prepares {equal_counts} alike" + (
        f"; {clips} clips are not compared, which needs torchvision" if clips else ""
    )


@cache
def _load_pretrained(folder: Path, name: str, **options: Any) -> Any:
    """Return the object that an `Auto` class of transformers loads from a folder, without torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    return getattr(transformers, name).from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **options
    )


def _compare_sound(folder: Path, source: Any, decoded: DecodedMedium) -> str:
    """Return how the features of an audio file differ, "" if they are equal."""
    extractor = _load_pretrained(folder, "AutoFeatureExtractor")
    rate_hz = extractor.sampling_rate
    sound = read_sound(source, extractor.n_samples, rate_hz)
    features = extractor(sound, sampling_rate=rate_hz, return_tensors="np")["input_features"]
    is_close = np.allclose(features, decoded.fields["mel"], atol=SOUND_TOLERANCE)
    return "" if is_close else "its audio features differ from those of transformers"


def _compare_picture(folder: Path, source: Any, decoded: DecodedMedium) -> str:
    """Return how the pixels of a picture differ, "" if they are equal. Pixel values are sorted
    first, since their order depends on the vision tower."""
    processor = _load_pretrained(folder, "AutoImageProcessor", backend="pil")
    crops = {"crop_to_patches": True} if hasattr(processor, "crop_to_patches") else {}
    prepared = processor(
        [read_picture(source)], do_rescale=False, do_normalize=False, return_tensors="np", **crops
    )
    colours = np.asarray(prepared["pixel_values"])
    if "image_position_ids" in prepared:  # padded to one length
        colours = colours[np.asarray(prepared["image_position_ids"])[..., 0] >= 0]
    pixels = next(decoded.fields[name] for name in ("pixels", "patches") if name in decoded.fields)
    if colours.size != pixels.size:
        return f"its picture has {pixels.size} pixel values here, {colours.size} in transformers"
    is_equal = np.array_equal(np.sort(colours, axis=None), np.sort(pixels, axis=None))
    return "" if is_equal else "the pixels of its picture differ from those of transformers"
