"""Sources of samples, decoding, tiling, tokenizing, packing and loading."""

from dflop_jax.data.build import make_source
from dflop_jax.data.datasets.scenes import SceneSource
from dflop_jax.data.decoder import BadSample, ThreadDecoder
from dflop_jax.data.loader import Loader, make_loader
from dflop_jax.data.media.spec import MediaSpec
from dflop_jax.data.packing import PackedGroup, pack_groups
from dflop_jax.data.sample import EMPTY_SAMPLE, Sample, Source
from dflop_jax.data.text.tokenize import ByteTokenizer, Tokenizer
