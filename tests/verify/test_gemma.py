"""Gemma against transformers, every tensor and buffer random: pictures, clips and text."""

import pytest

from dflop_jax.verify.verify import verify
from models import gemma, gemma4, gemma4_hf, gemma_hf
from tests.verify import gemma_folders
from tests.verify.equal import check_equal


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "kind, more",
    [
        ("gemma3_text", {"tie_word_embeddings": False, "final_logit_softcapping": 10.0}),
        ("gemma3", {}),
        ("gemma4", {}),
    ],
)
def test_parity(tmp_path, kind, more):
    folder = getattr(gemma_folders, kind)(tmp_path / "it", **more)
    assert len(list(folder.glob("*.safetensors"))) > 1
    check_equal(verify(folder))


@pytest.mark.slow
def test_where_transformers_itself_rounds_much(tmp_path, monkeypatch):
    """Products of normed queries and keys have no scale in Gemma 4: where those of the norms are
    near 1, a random model is chaotic, and float64 says who is how far off."""
    usual = gemma_folders.value_of

    def near_one(name, shape, rng, scale_one):
        return usual(name, shape, rng, scale_one=False)

    monkeypatch.setattr(gemma_folders, "value_of", near_one)
    result = verify(gemma_folders.gemma4_text(tmp_path / "it", seed=3))
    assert result.exit_code == 0
    assert result.rounding[0] > 1e-5
    assert 1e-5 < result.max_logit_error < 3 * result.rounding[0]


OLD = {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "sliding_window_pattern": 3}


def test_older_spellings_of_a_configuration():
    """Published folders of Gemma 3 name bases and the pattern otherwise."""
    text = gemma_folders.text3()
    del text["rope_parameters"]
    old = text | OLD | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    size = gemma_hf.read_gemma3_text(old).decoder
    assert size.kinds == ("sliding", "sliding", "global") * 2 + ("sliding",)
    assert (size.whole.theta, size.whole.factor) == (5e5, 8.0)
    assert (size.sliding.theta, size.sliding.factor, size.sliding.window) == (2e3, 1.0, 9)


@pytest.mark.parametrize("name", ["gemma3-4b", "gemma3-12b", "gemma3-27b", "gemma3-nano"])
def test_a_size_comes_back_from_its_configuration(name):
    model = gemma.build(name)
    assert gemma_hf.read_gemma3(model.weights.config) == model.size
    assert model.weights.mismatches(model.weights.config) == []


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-text-nano"])
def test_a_size_of_text_comes_back_from_its_configuration(name):
    model = gemma.build_text(name)
    assert gemma_hf.read_gemma3_text(model.weights.config) == model.size


def test_both_forms_of_gemma_4s_configuration():
    """As published, and as transformers writes it again."""
    published = gemma_folders.text4()
    written = gemma_folders.transformers.Gemma4TextConfig(**published).to_dict()
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    sizes = [gemma4_hf.read_text(config) for config in (published, written)]
    assert sizes[0] == sizes[1]
    whole = sizes[0].decoder.whole
    assert (whole.head_dim, whole.n_kv_heads, whole.turned, whole.window) == (32, 1, 4, 0)
    assert whole.values_are_keys


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-nano", "gemma4-tiny"])
def test_a_size_of_gemma_4_comes_back_from_its_configuration(name):
    model = gemma4.build(name)
    assert gemma4_hf.read(model.weights.config) == model.size
    assert model.weights.mismatches(model.weights.config) == []


@pytest.mark.parametrize(
    "more, said",
    [
        ({"hidden_size_per_layer_input": 256}, "per-layer embeddings .*E-forms"),
        ({"num_kv_shared_layers": 2}, "share keys and values .*E-forms"),
        ({"enable_moe_block": True}, "experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "equal heads"),
        ({"per_layer_config": {"2": {"sliding_window": 64}}}, "per_layer_config.2 has"),
    ],
)
def test_what_gemma_4_has_besides_is_refused_by_name(more, said):
    with pytest.raises(ValueError, match=said):
        gemma4_hf.read_text(gemma_folders.text4(**more))


def test_sound_of_gemma_4_is_refused_by_name():
    with pytest.raises(ValueError, match="audio_config: sound is not built"):
        gemma4_hf.read({"text_config": gemma_folders.text4(), "audio_config": {"hidden_size": 8}})


@pytest.mark.parametrize(
    "more, said",
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must be 7"),
        ({"layer_types": ["chunked"] * 7}, "layer_types must be 7"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn' is not built"),
    ],
)
def test_what_is_not_built_is_named(more, said):
    with pytest.raises(ValueError, match=said):
        gemma_hf.read_gemma3_text(gemma_folders.text3(**more))
