"""Folders that transformers wrote: read onto submeshes, written back, loaded by transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import randomise, torch, transformers

from dflop_jax.runtime.layout import make_segments
from dflop_jax.verify.round_trip import spread
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import hf, internvl, llava, qwen2_audio, qwen3_vl
from models.composed import Published
from models.decoder import DecoderModule
from models.sizes import AUDIO, DECODERS, VISION, ModelSize
from models.vit import VisionModule

F32 = jnp.dtype("float32")
NANO = DECODERS["nano"]
QWEN = dataclasses.replace(NANO, tied=False)
UNTIED = dataclasses.replace(NANO, tied=False, qkv_bias=False)
SIGLIP = dataclasses.replace(VISION["nano"], merge=1, post_norm=False)

CASES = {
    "llava": (
        Published(ModelSize(UNTIED, SIGLIP, layout="anyres"), F32),
        transformers.LlavaOnevisionForConditionalGeneration,
    ),
    "internvl, tied": (
        Published(ModelSize(NANO, VISION["internvit-nano"], layout="dynamic"), F32),
        transformers.InternVLForConditionalGeneration,
    ),
    "qwen2-audio": (
        Published(ModelSize(QWEN, audio=AUDIO["whisper-nano"]), F32),
        transformers.Qwen2AudioForConditionalGeneration,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_it_did_not_write(name, tmp_path):
    """Of segments, without a source, as for a model that was trained from nothing."""
    model, cls = CASES[name]
    map_ = model.weights
    kind = {"model_type": map_.config["model_type"], **map_.config}
    theirs = randomise(cls(transformers.AutoConfig.for_model(**kind)), 5)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    source = Folder(tmp_path / "theirs", map_)
    segments = make_segments(model, spread(model, 4, map_.tensors), jax.devices()).values()
    held = [ModuleParams(s.plan.module, read_segment(source, s), s.layer_rows) for s in segments]
    write_folder(tmp_path / "new", map_, held, max_file_bytes=60_000)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["architectures"] == [cls.__name__]
    assert_loads(cls, tmp_path / "new", theirs, but=tuple(u.name for u in map_.unused))


def assert_loads(cls, folder, want, but=()):
    """Transformers finds every tensor, none too many, with the same values."""
    loaded, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    mine = dict(loaded.named_parameters())
    for name, p in want.named_parameters():
        if not name.endswith(but):
            assert torch.equal(p, mine[name]), name


def test_a_tower_of_its_own_folder(tmp_path):
    """SigLIP as published, with a text model beside it and one layer more than is used."""
    size = dataclasses.replace(SIGLIP, n_layers=1)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = transformers.SiglipConfig(
        vision_config={
            **hf.tower(VisionModule(SIGLIP, 8, F32)).config,
            "vision_use_head": True,
        },
        text_config={**small, "intermediate_size": 8, "vocab_size": 99},
    )
    theirs = randomise(transformers.SiglipModel(config), 6)
    theirs.save_pretrained(tmp_path / "siglip")
    map_ = hf.tower(VisionModule(size, 8, F32))
    source = Folder(tmp_path / "siglip", map_)
    source.check()
    name = "encoder.layers.0.mlp.fc1.weight"
    found = source.read(name, (slice(0, 64), slice(0, 32)))
    want = theirs.vision_model.encoder.layers[0].mlp.fc1.weight
    np.testing.assert_array_equal(found, want.detach().numpy())


PUBLISHED = {
    "llava-ov-7b": (llava, "LlavaOnevisionForConditionalGeneration"),
    "internvl-2.5-1b": (internvl, "InternVLForConditionalGeneration"),
    "internvl-2.5-38b": (internvl, "InternVLForConditionalGeneration"),
    "qwen2-audio-7b": (qwen2_audio, "Qwen2AudioForConditionalGeneration"),
    "qwen3-vl-2b": (qwen3_vl, "Qwen3VLForConditionalGeneration"),
    "qwen3-vl-32b": (qwen3_vl, "Qwen3VLForConditionalGeneration"),
}


def on_paper(map_, cls):
    """{name: shape} of the reference of a configuration, without values."""
    config = transformers.AutoConfig.for_model(**dict(map_.config))
    with torch.device("meta"):
        model = getattr(transformers, cls)(config)
    return {map_.canonical(n): tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_names_and_shapes_of_the_reference(name):
    factory, cls = PUBLISHED[name]
    map_ = factory.build(name).weights
    ours = {t.name: t.layout.file_shape for t in map_.tensors}
    unused = {u.name: u.shape for u in map_.unused}
    assert on_paper(map_, cls) == ours | unused


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-72b", "llama3-70b"])
def test_published_decoders_have_the_names_and_shapes_of_the_reference(name):
    map_ = hf.decoder(DecoderModule(DECODERS[name], F32))
    cls = "LlamaForCausalLM" if name.startswith("llama") else "Qwen2ForCausalLM"
    assert on_paper(map_, cls) == {t.name: t.layout.file_shape for t in map_.tensors}
