"""From a record to tokens, tiles and features: against the three whole published processors."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.index_build import LocalRowReader
from dflop_jax.data.datasets.mixture import MixtureEntry
from dflop_jax.data.datasets.mixture_source import IndexRules, MixtureSource, open_readers
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.audio import count_samples, read_sound
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.media.tiles import DynamicTiling, between_frames
from dflop_jax.data.text.chat import ChatTokenizer
from models.processors import IMAGENET_MEAN, IMAGENET_STD
from tests.data.media_cases import made_dataset, normalized, upright
from tests.data.text.test_chat import CHATML, PARTS, SPECIAL, write
from tests.data.views import from_pictures, mel, mel_frames, prepared, tiles, tokens

INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}  # fmt: skip


# As InternVL's: the parts of a message in their order.
IN_ORDER = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for c in message.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}{{ '<video>\\n' }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"""


@pytest.fixture
def published(monkeypatch):
    """The modules of transformers; its processors would ask for torchvision for videos alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of what is tested
        transformers = pytest.importorskip("transformers")
        import transformers.processing_utils as processing
        from transformers.models.got_ocr2 import image_processing_pil_got_ocr2
        from transformers.models.internvl import processing_internvl
        from transformers.models.llava_onevision import (
            image_processing_pil_llava_onevision,
            processing_llava_onevision,
        )
        from transformers.models.qwen2_audio import processing_qwen2_audio

    monkeypatch.setattr(
        processing.ProcessorMixin, "check_argument_for_proper_class", lambda *_: object
    )

    class Published:
        def tokenizer(self, folder):
            return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))

        def llava_onevision(self, folder):
            images = image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil()
            return processing_llava_onevision.LlavaOnevisionProcessor(
                images, self.tokenizer(folder), None, num_image_tokens=729,
                vision_feature_select_strategy="full",
            )  # fmt: skip

        def internvl(self, folder):
            images = image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil(
                size={"height": 448, "width": 448}, image_mean=list(IMAGENET_MEAN),
                image_std=list(IMAGENET_STD),
            )  # fmt: skip
            return processing_internvl.InternVLProcessor(images, self.tokenizer(folder), None)

        qwen2_audio_template = (
            processing_qwen2_audio.Qwen2AudioProcessor.default_chat_template.fget(None)
        )

        def qwen2_audio(self, folder):
            extractor = transformers.WhisperFeatureExtractor(feature_size=128)
            return processing_qwen2_audio.Qwen2AudioProcessor(extractor, self.tokenizer(folder))

    return Published()


def ours(tmp_path, chat, how, kind, stands_for=""):
    """(record, its sample) of each made record that has this kind of medium alone."""
    mixture = (MixtureEntry(str(made_dataset(tmp_path / "data", 5))),)
    here = partial(LocalRowReader, open_readers(mixture), chat.encode_turns)
    # A template takes some kinds of media.
    rules = IndexRules(tmp_path / "index.npz", chat.digest, here, max_bad_fraction=1.0)
    stands = chat.media_id(stands_for or kind)
    config = DataConfig(max_tokens=10**6)
    found = MixtureSource(mixture, how, chat.encode_turns, rules, config, placeholder=stands)
    out = []
    for i in range(len(found)):
        record = found.record(i)
        if {k for k, _ in record.media} == {kind}:
            sample = found.sample(i)
            assert len(tokens(sample)) == found.load(i).tokens("llm")
            out.append((record, sample))
    assert out
    return out


def rendered(tokenizer, record, kind):
    """The conversation as the published template renders it, media as parts where it takes them."""
    chat = []
    for role, text in record.turns:
        content = []
        for k, part in enumerate(text.split(f"<{kind}>")):
            content += [{"type": kind}] * (k > 0) + [{"type": "text", "text": part}] * bool(part)
        only_text = all(c["type"] == "text" for c in content)
        chat.append({"role": {"human": "user", "gpt": "assistant"}[role],
                     "content": text if only_text else content})  # fmt: skip
    return tokenizer.apply_chat_template(chat, tokenize=False)


def test_llava_onevision(tmp_path, published):
    folder = write(tmp_path / "tok", PARTS)
    processor, chat = published.llava_onevision(folder), ChatTokenizer(folder)
    how = prepared(AnyRes())
    for record, sample in ours(tmp_path, chat, how, "image"):
        images = [upright(path) for _, path in record.media]
        text = rendered(processor.tokenizer, record, "image")
        expected = processor(text=[text], images=[images], return_tensors="np")
        assert tokens(sample).tolist() == expected["input_ids"][0].tolist()
        assert len(tiles(sample)) == np.prod(expected["pixel_values"].shape[:-3])


def test_internvl(tmp_path, published):
    special = [*SPECIAL, *INTERNVL.values()]
    folder = write(tmp_path / "tok", CHATML, {"extra_special_tokens": INTERNVL}, special)
    processor, chat = published.internvl(folder), ChatTokenizer(folder)
    for record, sample in ours(tmp_path, chat, prepared(DynamicTiling()), "image"):
        images = [upright(path) for _, path in record.media]
        turns = [{"role": {"human": "user", "gpt": "assistant"}[role],
                  "content": text.replace("<image>", "<IMG_CONTEXT>")}
                 for role, text in record.turns]  # fmt: skip
        text = processor.tokenizer.apply_chat_template(turns, tokenize=False)
        expected = processor(text=[text], images=images, return_tensors="np")
        assert tokens(sample).tolist() == expected["input_ids"][0].tolist()
        pixels = expected["pixel_values"].transpose(0, 2, 3, 1)
        assert np.abs(normalized(tiles(sample)) - pixels).max() < 1e-5


def test_internvl_clips(tmp_path, published):
    """Each frame is named in the text. The processor is given the frames; to cut them would need
    torchvision."""
    special = [*SPECIAL, *INTERNVL.values()]
    folder = write(tmp_path / "tok", IN_ORDER, {"extra_special_tokens": INTERNVL}, special)
    processor, chat = published.internvl(folder), ChatTokenizer(folder)
    how = prepared(DynamicTiling(), max_frames=12, between_frames=between_frames(chat, 12))
    for record, sample in ours(tmp_path, chat, how, "video", "image"):
        frames = {"pixel_values_videos": [np.zeros(len(tiles(sample)))]}
        clip = processor.replace_video_token(frames, 0)
        text = rendered(processor.tokenizer, record, "video").replace("<video>", clip)
        assert len(tiles(sample)) > 1
        assert tokens(sample).tolist() == processor.tokenizer(text)["input_ids"]
        n_placeholders = (tokens(sample) == chat.media_id("image")).sum()
        assert from_pictures(sample).sum() == 256 * len(tiles(sample)) == n_placeholders


def test_qwen2_audio(tmp_path, published):
    special = [*SPECIAL, "<|audio_bos|>", "<|audio_eos|>"]
    folder = write(tmp_path / "tok", published.qwen2_audio_template, special=special)
    processor, chat = published.qwen2_audio(folder), ChatTokenizer(folder)
    for record, sample in ours(tmp_path, chat, prepared(sound=MelSpec()), "audio"):
        text = rendered(processor.tokenizer, record, "audio")
        path = record.media[0][1]
        sound = read_sound(path, min(count_samples(path, 16000), 480_000), 16000)
        expected = processor(text=[text], audio=[sound], sampling_rate=16000, return_tensors="np")
        assert tokens(sample).tolist() == expected["input_ids"][0].tolist()
        assert mel_frames(sample).tolist() == expected["feature_attention_mask"].sum(1).tolist()
        assert np.abs(mel(sample) - expected["input_features"]).max() < 1e-4
