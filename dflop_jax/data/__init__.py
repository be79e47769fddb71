"""Sources of samples, decoding, tiling, tokenizing, packing and loading."""

from dflop_jax.data.build import make_source
from dflop_jax.data.datasets.llava import LlavaSource
from dflop_jax.data.datasets.scene_source import SceneSource
from dflop_jax.data.loader import Loader
from dflop_jax.data.packing import PackedGroup, pack_group
from dflop_jax.data.sample import Limits, MediaSpec, Sample, Source
from dflop_jax.data.text.pieces import ByteTokenizer, FileTokenizer, Tokenizer, make_tokenizer

__all__ = [
    "ByteTokenizer",
    "FileTokenizer",
    "Limits",
    "LlavaSource",
    "Loader",
    "MediaSpec",
    "PackedGroup",
    "Sample",
    "SceneSource",
    "Source",
    "Tokenizer",
    "make_source",
    "make_tokenizer",
    "pack_group",
]
