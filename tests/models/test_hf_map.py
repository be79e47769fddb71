"""The map from checkpoints to parameters: a bijection, for every size; configurations both ways."""

import json
from functools import partial
from itertools import groupby

import jax
import pytest

from models import hf, hf_sizes, internvl, llava, qwen2_audio, qwen3_vl
from models.hf_sizes import folder_size

MODELS = {
    **dict.fromkeys(("llava-ov-0.5b", "llava-ov-7b", "llava-ov-llama3-8b"), llava.build),
    **dict.fromkeys(("internvl-nano", "internvl-2.5-1b", "internvl-2.5-78b"), internvl.build),
    **dict.fromkeys(("qwen2-audio-nano", "qwen2-audio-7b"), qwen2_audio.build),
    **dict.fromkeys(("qwen3-vl-2b", "qwen3-vl-8b"), qwen3_vl.build),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_once(name):
    """{(module, part, path): (shape, layers)} of the model, and of its map."""
    model, want = MODELS[name](name), {}
    map_ = model.weights
    for key, module in model.modules.items():
        for part in module.inputs:
            specs = jax.eval_shape(partial(module.init, part), jax.random.key(0))
            layers = list(range(module.n_layers)) if part == "layers" else [None]
            for path, leaf in jax.tree_util.tree_leaves_with_path(specs):
                want[key, part, tuple(k.key for k in path)] = (leaf.shape, layers)

    def place(t):
        return (t.module, t.part, t.path)

    found = {k: list(g) for k, g in groupby(sorted(map_.tensors, key=place), key=place)}
    assert found.keys() == want.keys()
    for key, group in found.items():
        shape, layers = want[key]
        assert {t.layout.shape for t in group} == {shape}
        assert [t.layer for t in group] == layers
    names = [t.name for t in map_.tensors]
    assert len(set(names)) == len(names)
    for t in map_.tensors:
        assert map_.canonical(t.name) == t.name
        assert not map_.is_ignored(t.name)
    for u in map_.unused:
        assert map_.is_ignored(u.name)


@pytest.mark.parametrize("old, new", [
    ("lm_head.weight", "language_model.lm_head.weight"),
    ("model.language_model.layers.0.mlp.up_proj.weight",
     "language_model.model.layers.0.mlp.up_proj.weight"),
    ("language_model.model.norm.weight", "language_model.model.norm.weight"),
    ("model.vision_tower.encoder.layers.1.mlp.fc1.bias",
     "vision_tower.encoder.layers.1.mlp.fc1.bias"),
    ("vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias",
     "vision_tower.encoder.layers.1.mlp.fc1.bias"),
    ("model.image_newline", "image_newline"),
])  # fmt: skip
def test_other_spellings(old, new):
    assert llava.build("llava-ov-0.5b").weights.canonical(old) == new


@pytest.mark.parametrize("name", MODELS)
def test_configuration_there_and_back(name, tmp_path):
    model = MODELS[name](name)
    map_ = model.weights
    assert map_.mismatches(map_.config) == []
    (tmp_path / "config.json").write_text(json.dumps(dict(map_.config)))
    assert MODELS[name](str(tmp_path)) == model
    config = json.loads(json.dumps(dict(map_.config)))
    config["text_config"]["hidden_size"] = 8
    assert map_.mismatches(config) == [("text_config.hidden_size", 8, model.size.decoder.width)]


def test_released_qwen2_audio_configuration():
    """What the released folder says; the rest is transformers' defaults."""
    config = {
        "model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 1280},
        "text_config": {
            "model_type": "qwen2",
            "intermediate_size": 11008,
            "rope_theta": 10000,
            "rms_norm_eps": 1e-5,
            "vocab_size": 156032,
        },
    }
    model = qwen2_audio.build("qwen2-audio-7b")
    assert model.weights.mismatches(config) == []
    assert hf_sizes.read_qwen2_audio(config) == model.size


def test_scaled_positions_are_a_mismatch():
    """Llama 3.1's: not in the table, and not computed."""
    map_ = hf.decoder_weights(llava.build("llava-ov-llama3-8b").modules["llm"])
    config = {**map_.config, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"}}
    del config["rope_parameters"]
    key = "rope_parameters.rope_type"
    assert map_.mismatches(config) == [(key, "llama3", "default")]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "not JSON"),
        ("[]", "model_type is None"),
        ('{"model_type": "llava"}', "'llava'"),
        ('{"model_type": "internvl", "text_config": {"model_type": "gemma"}}', "'gemma'"),
        ('{"model_type": "internvl", "text_config": {"num_attention_heads": 3}}', "heads"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said) as e:
        internvl.build(str(tmp_path))
    assert str(tmp_path) in str(e.value)
    assert "\n" not in str(e.value)


def test_models_that_the_reference_cannot_hold():
    with pytest.raises(ValueError, match="llava-ov-7b"):
        _ = llava.build("nano").weights
    with pytest.raises(ValueError, match="tied"):
        _ = qwen2_audio.build("whisper-nano+nano").weights


def test_a_published_qwen3_vl_is_the_named_size(tmp_path):
    """In the form that it was published in: an older spelling, the tower by the whole's name."""
    text = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 8, "intermediate_size": 12288, "head_dim": 128}
    rotary = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    vision = {"model_type": "qwen3_vl", "out_hidden_size": 4096, "num_heads": 16, "depth": 27}
    config = {
        "model_type": "qwen3_vl",
        "text_config": text | {"rope_theta": 5000000, "rope_scaling": rotary},
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert qwen3_vl.build(str(tmp_path)) == qwen3_vl.build("qwen3-vl-8b")
    assert qwen3_vl.build("qwen3-vl-8b").weights.mismatches(config) == []
    found = qwen3_vl.build("qwen3-vl-4b").weights.mismatches(config)
    assert ("text_config.hidden_size", 4096, 2560) in found


GOOD = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "vision_config": {"model_type": "qwen3_vl", "out_hidden_size": 64},
}


@pytest.mark.parametrize(
    "where, key, value, message",
    [
        ("text_config", "rope_scaling", {"mrope_section": [24, 20, 19]}, "mrope_section"),
        ("text_config", "rope_scaling", {"mrope_section": [0, 32, 32]}, "a third"),
        ("text_config", "rope_scaling", {"mrope_section": "24"}, "list of integers"),
        ("text_config", "head_dim", 64, "sum 32"),
        ("vision_config", "deepstack_visual_indexes", [8, 8, 24], "must be ascending"),
        ("vision_config", "deepstack_visual_indexes", [8, 16, 27], "0 to 26"),
        ("vision_config", "out_hidden_size", 32, "must be equal"),
        ("vision_config", "num_position_embeddings", 2305, "not a square"),
    ],
)
def test_a_bad_qwen3_vl_is_named(where, key, value, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD))
    assert folder_size(str(tmp_path), "qwen3_vl").vision.deepstack == (8, 16, 24)
    file.write_text(json.dumps(GOOD | {where: GOOD[where] | {key: value}}))
    with pytest.raises(ValueError, match=message) as error:
        folder_size(str(tmp_path), "qwen3_vl")
    assert "\n" not in str(error.value)
