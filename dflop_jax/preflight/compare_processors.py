"""Some samples prepared here and by `transformers`, beside each other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop_jax.data.bounds import one_line
from dflop_jax.data.build import RecordDataset
from dflop_jax.data.datasets.record_parser import Record
from dflop_jax.data.datasets.record_table import IndexRow, build_table
from dflop_jax.data.media.audio import AUDIO, read_sound
from dflop_jax.data.media.compose import decode_media
from dflop_jax.data.media.kind import Kinds
from dflop_jax.data.media.medium import DecodedMedium
from dflop_jax.data.media.tiling import IMAGE, read_scaled
from dflop_jax.data.media.video import VIDEO
from dflop_jax.data.text.chat import ChatTokenizer

COMPARED_KINDS = {IMAGE.name: "pictures", AUDIO.name: "sounds"}  # kinds of media
SOUND_TOLERANCE = 1e-3  # of log-mel features, which differ by the order of sums


def compare_preparations(
    dataset: RecordDataset,
    kinds: Kinds,
    samples: Sequence[tuple[Record, IndexRow]],
    *,
    of_model: bool,
) -> str:
    """Return in words whether text, pixels and sounds of the samples equal what `transformers`
    makes of them with the files of the tokenizer's folder, or the first difference; "" without one.

    Args:
      of_model: whether the folder is the model's own; else text alone is compared.
    """
    tokenizer = dataset.tokenizer
    if not isinstance(tokenizer, ChatTokenizer):
        return ""
    published = _Published(tokenizer)
    counts, clips = dict.fromkeys(("texts", *COMPARED_KINDS.values()), 0), 0
    for record, row in samples:
        messages, variables = tokenizer.messages(record.turns, record.fields)
        if tokenizer.rendered(messages, variables) != published.rendered(messages, variables):
            return f"{record.name}: its text differs from that of transformers"
        counts["texts"] += 1
        table = build_table([row.record], [row.media], kinds)
        decoded = decode_media(record, table, 0, dataset.preparation) if of_model else {}
        alone = sum(kind == IMAGE.name for kind, _ in record.media) == 1
        for number, (kind, source) in enumerate(record.media if of_model else ()):
            clips += kind == VIDEO.name
            if kind not in COMPARED_KINDS or (kind == IMAGE.name and not alone):
                continue
            try:
                differs = published.differs(kind, source, decoded[number][1])
            except Exception as e:  # of a processor of any family
                return (
                    f"{record.name}: transformers cannot prepare its {kind} ({one_line(e)[:120]})"
                )
            if differs:
                return f"{record.name}: {differs}"
            counts[COMPARED_KINDS[kind]] += 1
    equal_counts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    return f"transformers prepares {equal_counts} alike" + (
        f"; {clips} clips are not compared, that needs torchvision" if clips else ""
    )


class _Published:
    """The processors of a tokenizer's folder, without torch."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
        self._hf: Any = transformers
        self._folder, self._template = str(tokenizer.folder), tokenizer.template
        self._loaded: dict[str, Any] = {}

    def _load(self, name: str, **options: Any) -> Any:
        if name not in self._loaded:
            auto = getattr(self._hf, name)
            self._loaded[name] = auto.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False, **options
            )
        return self._loaded[name]

    def rendered(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        return self._load("AutoTokenizer").apply_chat_template(
            messages, chat_template=self._template, tokenize=False, **variables
        )

    def differs(self, kind: str, source: Any, decoded: DecodedMedium) -> str:
        """How a picture or a sound differs, "" where it does not. Pixels are compared as sorted
        colours: towers take them in orders of their own."""
        if kind == AUDIO.name:
            extractor = self._load("AutoFeatureExtractor")
            rate = extractor.sampling_rate
            sound = read_sound(source, extractor.n_samples, rate)
            features = extractor(sound, sampling_rate=rate, return_tensors="np")["input_features"]
            is_close = np.allclose(features, decoded.fields["mel"], atol=SOUND_TOLERANCE)
            return "" if is_close else "its sound has other features than in transformers"
        processor = self._load("AutoImageProcessor", backend="pil")
        picture, _ = read_scaled(source, None)
        crops = {"crop_to_patches": True} if hasattr(processor, "crop_to_patches") else {}
        prepared = processor(
            [picture], do_rescale=False, do_normalize=False, return_tensors="np", **crops
        )
        colours = np.asarray(prepared["pixel_values"])
        if "image_position_ids" in prepared:  # padded to one length
            colours = colours[np.asarray(prepared["image_position_ids"])[..., 0] >= 0]
        (own_colours,) = (
            decoded.fields[name] for name in ("pixels", "patches") if name in decoded.fields
        )
        if colours.size != own_colours.size:
            return (
                f"its picture has {own_colours.size} colours here, {colours.size} in transformers"
            )
        equal_counts = np.array_equal(np.sort(colours, axis=None), np.sort(own_colours, axis=None))
        return "" if equal_counts else "its picture has other pixels than in transformers"
