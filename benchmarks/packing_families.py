"""The families that `packing_exact.py` packs, one a line, and random samples of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.config import DataConfig, ModelConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import ByteTokenizer, MediaSpec, Sample
from dflop_jax.data.datasets.clip_lists import Clip
from dflop_jax.data.datasets.clips import ClipSource, Grid, clip_format_of
from dflop_jax.data.media.medium import module_of
from dflop_jax.train.run_context import build_model
from dflop_jax.verify.samples import StampedTokenizer, random_sample, small_limits

# A sample of records: its media and the tokens of text after them. Five tokens stand before, so
# that texts are from less than a chunk of linear attention (64 tokens) to more than three.
Form = tuple[tuple[str, ...], int]
FORMS: tuple[Form, ...] = (
    ((), 1),
    ((), 58),
    ((), 59),
    ((), 60),
    ((), 107),
    ((), 207),
    (("image",), 40),
    (("image", "image"), 3),
    (("video",), 71),
    (("audio",), 64),
    (("audio", "audio"), 2),
)
# A captioned clip: tokens of its text, and its patches along time, rows and columns.
CLIPS = ((2, (1, 2, 2)), (17, (2, 3, 4)), (64, (1, 4, 5)), (65, (4, 4, 4)), (90, (3, 8, 8)))
Drawing = Callable[[int], Sample]  # by a seed, one of some lengths


@dataclass(frozen=True)
class Family:
    """What `model.factory` and its fields would say of a model.

    Attributes:
      calm: changes random parameters (of a part, by path below it) under which a family magnifies
        any rounding, packed or alone.
      state: MODULE:FUNCTION of what carries a state from token to token and is given the segment
        ids last; "" where nothing does.
    """

    factory: str
    size: str
    kernel: str = "auto"
    dtype: str = "float32"
    state: str = ""
    calm: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    @property
    def model(self) -> MultimodalModel:
        kernel, dtype = cast("Any", self.kernel), cast("Any", self.dtype)
        config = ModelConfig(self.factory, self.size, dtype=dtype, attention_kernel=kernel)
        return build_model(config)

    def by(self, kernel: str) -> Family:
        """The same by an attention kernel of that name."""
        return replace(self, kernel=kernel)

    @property
    def plainly(self) -> Family:
        """The same by what runs everywhere, in float32."""
        return replace(self, kernel="auto", dtype="float32")

    def without_resets(self) -> AbstractContextManager[Any]:
        """While it is open, the state of programs that are traced goes from piece to piece."""
        if not self.state:
            return nullcontext()
        module, _, name = self.state.partition(":")
        carry = getattr(importlib.import_module(module), name)

        def carried(*args: Any, **options: Any) -> Any:
            *others, segment_ids = args
            return carry(*others, jnp.minimum(segment_ids, 1), **options)

        return patch(f"{module}.{name}", carried)


def _reading_what_is_written(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Queries of a gated delta net near its keys: one at a right angle to all keys reads next to
    nothing, and the norm behind makes that as large as any."""
    if "query_conv" not in part:
        return part

    def near(query: Any, key: Any) -> Any:
        return jax.tree.map(lambda q, k: k + 0.3 * q, query, key)

    near_keys = {f"query{end}": near(part[f"query{end}"], part[f"key{end}"]) for end in ENDS}
    return {**part, **near_keys}


def _looking_widely(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scales of normed queries and keys that are smaller: products of them are not divided by the
    root of their width, and at 1 attention is all but a choice of the largest."""
    norms = {name: part[name] for name in ("query_norm", "key_norm") if name in part}
    return {**part, **jax.tree.map(lambda scale: 0.4 * scale, norms)}


ENDS = ("", "_conv")  # of names of what makes queries and keys
DELTA = "models.qwen3_5_decoder:delta_mix"
FAMILIES = {
    "llava": Family("models.llava:build", "nano"),
    "llava_onevision": Family("models.llava:build", "anyres-nano"),
    "internvl": Family("models.internvl:build", "internvl-nano"),
    "qwen2_audio": Family("models.qwen2_audio:build", "qwen2-audio-nano"),
    "omni": Family("models.omni:build", "omni-nano"),
    "qwen3_vl": Family("models.qwen3_vl:build", "qwen3-vl-nano"),
    "gemma3": Family("models.gemma:build", "gemma3-nano"),
    "gemma3_text": Family("models.gemma:build_text", "gemma3-text-nano"),
    "qwen3_5": Family(
        "models.qwen3_5:build", "qwen3.5-nano", state=DELTA, calm=_reading_what_is_written
    ),
    "qwen3_5_text": Family(
        "models.qwen3_5:build_text", "qwen3.5-text-nano", state=DELTA, calm=_reading_what_is_written
    ),
    "gemma4": Family("models.gemma4:build", "gemma4-nano", calm=_looking_widely),
    "gemma4_text": Family("models.gemma4:build_text", "gemma4-text-nano", calm=_looking_widely),
    "wan": Family("models.wan:build", "nano+wan-nano"),
}
# One of a tower, of pictures in both directions, of windows and heads of two sizes, of states.
BY_KERNELS = ("llava", "gemma3", "gemma4_text", "qwen3_5_text", "wan")
FAMILIES |= {f"{name}, GPU kernels": FAMILIES[name].by("pallas") for name in BY_KERNELS}


def drawings(model: MultimodalModel) -> list[Drawing]:
    """Ways to draw a sample of a model; those of one way have equal lengths and other contents."""
    return _clips(model) if hasattr(model, "data_factory") else _records(model)


def _records(model: MultimodalModel) -> list[Drawing]:
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    how = spec.prepared(small_limits(spec), StampedTokenizer())

    def drawn(number: int, form: Form, seed: int) -> Sample:
        sizes, values = (np.random.default_rng(key) for key in ((number,), (number, seed)))
        return random_sample(*form, how, model.vocab_size, sizes=sizes, values=values).sample

    forms = [f for f in FORMS if all(module_of(how, kind) for kind in f[0])]
    return [partial(drawn, n, form) for n, form in enumerate(forms)]


class _Spelled(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def _clips(model: MultimodalModel) -> list[Drawing]:
    form = clip_format_of(model)

    def drawn(n_text: int, grid: Grid, seed: int) -> Sample:
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, model.vocab_size, n_text).tolist()
        shape = (form.channels, *(n * p for n, p in zip(grid, form.patch, strict=True)))
        values = rng.standard_normal(shape, np.float32)
        clip = Clip("noise", " ".join(map(str, ids)), shape, lambda: values)
        source = ClipSource(
            "noise", [clip], form, _Spelled(), DataConfig(), seed=seed, split="train"
        )
        return source.sample(0)

    return [partial(drawn, n_text, grid) for n_text, grid in CLIPS]
