"""Gemma against transformers, every tensor and buffer random: pictures, clips and text."""

import pytest

from dflop_jax.verify.verify import verify
from models import gemma, gemma4, gemma4_hf, gemma_hf
from tests.verify import gemma_folders
from tests.verify.folders import check_equal


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


@pytest.mark.parametrize(
    "build, read, names",
    [
        (
            gemma.build,
            gemma_hf.read_gemma3,
            ("gemma3-4b", "gemma3-12b", "gemma3-27b", "gemma3-nano"),
        ),
        (gemma.build_text, gemma_hf.read_gemma3_text, ("gemma3-1b", "gemma3-text-nano")),
        (gemma4.build, gemma4_hf.read, ("gemma4-31b", "gemma4-nano", "gemma4-tiny")),
    ],
)
def test_a_size_comes_back_from_its_configuration(build, read, names):
    for name in names:
        model = build(name)
        assert read(model.weights.config) == model.size
        assert model.weights.mismatches(model.weights.config) == []


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
