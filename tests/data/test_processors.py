"""Media and their tokens against the published processors."""

from __future__ import annotations

import logging
import warnings
from functools import partial

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.index_build import IndexRules, LocalRowReader
from dflop_jax.data.datasets.mixture import MixtureEntry
from dflop_jax.data.datasets.mixture_source import MixtureSource, open_readers
from dflop_jax.data.media.fitted import FORM, Fitted, fitted_blocks
from dflop_jax.data.media.tiles import DynamicTiling, between_frames
from dflop_jax.data.media.video import ClipHeader
from dflop_jax.data.text.chat import ChatTokenizer
from tests.data.media_cases import made_dataset
from tests.data.text.test_chat import SPECIAL, write
from tests.data.views import from_pictures, prepared, tiles, tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from transformers import processing_utils
    from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2
    from transformers.models.internvl import processing_internvl
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}  # fmt: skip


# As InternVL's: the parts of a message in their order.
IN_ORDER = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for c in message.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}{{ '<video>\\n' }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"""


def test_internvl_clips(tmp_path, monkeypatch):
    """Each frame is named in the text. The processor is given the frames; to cut them would need
    torchvision."""
    monkeypatch.setattr(
        processing_utils.ProcessorMixin, "check_argument_for_proper_class", lambda *_: object
    )
    special = [*SPECIAL, *INTERNVL.values()]
    folder = write(tmp_path / "tok", IN_ORDER, {"extra_special_tokens": INTERNVL}, special)
    processor = processing_internvl.InternVLProcessor(
        image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil(),
        transformers.PreTrainedTokenizerFast.from_pretrained(str(folder)), None,
    )  # fmt: skip
    chat = ChatTokenizer(folder)
    how = prepared(DynamicTiling(), max_frames=12, between_frames=between_frames(chat, 12))
    mixture = (MixtureEntry(str(made_dataset(tmp_path / "data", 5))),)
    here = partial(LocalRowReader, open_readers(mixture), chat.encode_turns)
    rules = IndexRules(tmp_path / "index.npz", chat.digest, here, max_bad_fraction=1.0)
    found = MixtureSource(
        mixture, how, chat.encode_turns, rules, DataConfig(max_tokens=10**6),
        placeholder=chat.media_id("image"),
    )  # fmt: skip
    (i,) = (i for i in range(len(found)) if {k for k, _ in found.record(i).media} == {"video"})
    sample, turns = found.sample(i), found.record(i).turns
    clip = processor.replace_video_token({"pixel_values_videos": [np.zeros(len(tiles(sample)))]}, 0)
    messages = []
    for (_, text), name in zip(turns, ("user", "assistant"), strict=True):
        before, *after = text.split("<video>")
        parts = [{"type": "text", "text": t} for t in (before, *after) if t]
        parts[bool(before) : bool(before)] = [{"type": "video"}] * len(after)
        messages.append({"role": name, "content": parts if after else text})
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    assert len(tiles(sample)) > 1
    ids = processor.tokenizer(text.replace("<video>", clip))["input_ids"]
    assert tokens(sample).tolist() == ids
    n_placeholders = (tokens(sample) == chat.media_id("image")).sum()
    assert from_pictures(sample).sum() == 256 * len(tiles(sample)) == n_placeholders


def test_sizes_equal_the_published_function():
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 5000), (5000, 1), (48, 48), (3000, 7), (7, 3000), (9999, 10000)]
    sizes += [tuple(int(n) for n in rng.integers(1, 3000, 2)) for _ in range(300)]
    for n_tokens in (70, 280, 1120):
        for width, height in sizes:
            want = gemma4.get_aspect_ratio_preserving_size(height, width, 16, 9 * n_tokens, 3)
            rows, cols = fitted_blocks(width, height, 48, n_tokens)
            assert (rows * 48, cols * 48) == want, (width, height, n_tokens)
    widths, heights = np.array(sizes).T
    rows, cols = Fitted(merge=3, frames=1).blocks({"width": widths, "height": heights})
    assert rows.all()
    assert (rows * cols).max() <= 280


@pytest.mark.parametrize("total", [1, 5, 32, 33, 900])
def test_frames_of_a_clip(total):
    clip = ClipHeader(640, 360, total, 30000, 1001)
    layout = Fitted(merge=3, frames=1, max_frames=32).clip(clip)
    metadata = VideoMetadata(total_num_frames=total, fps=30000 / 1001)
    want = default_sample_indices_fn(metadata, num_frames=min(32, total))
    np.testing.assert_array_equal(layout.frames, want)
    metadata.frames_indices = want
    np.testing.assert_allclose(layout.seconds, metadata.timestamps)
    height, width = gemma4.get_aspect_ratio_preserving_size(360, 640, 16, 9 * 70, 3)
    assert layout.grid == (height // 16, width // 16)


def test_limits_make_pictures_smaller_and_are_named():
    facts = {"patch_px": 16, "merge": 3, "soft_tokens": 280, "frame_tokens": 70}
    medium = FORM.build(facts, DataConfig(max_pixels=50 * 48**2, min_pixels=1), None)
    assert (medium.native.soft_tokens, medium.native.frame_tokens) == (50, 50)
    with pytest.raises(ValueError, match=r"data.max_pixels=100 must leave a block of 48x48"):
        FORM.build(facts, DataConfig(max_pixels=100, min_pixels=1), None)
