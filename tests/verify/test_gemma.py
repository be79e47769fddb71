"""Gemma against transformers, every tensor and buffer random: pictures, clips and text."""

import pytest

from dflop_jax.verify.verify import verify
from models import gemma, gemma_hf
from tests.verify import gemma_folders


def shares(result):
    """Of the largest logit (at least 1), of each tensor's largest gradient; every tensor the same
    bits."""
    assert result.not_compared == ""
    assert result.bit_identical
    return result.max_logit_error / max(1.0, result.largest_logit), result.max_grad_error


@pytest.mark.parametrize(
    "kind, more",
    [
        ("gemma3_text", {"tie_word_embeddings": False, "final_logit_softcapping": 3.0}),
        ("gemma3", {}),
    ],
)
def test_parity(tmp_path, kind, more):
    folder = getattr(gemma_folders, kind)(tmp_path / "it", **more)
    assert len(list(folder.glob("*.safetensors"))) > 1
    logits, gradients = shares(verify(folder))
    assert logits < 1e-5
    assert gradients < 1e-4


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
