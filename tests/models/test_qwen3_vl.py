"""Qwen3-VL's answers against the logits that `dflop verify` compares with transformers', and
folders of published configurations."""

import json

import jax
import numpy as np
import pytest

from dflop_jax.generate.mesh import answer_mesh, param_structs
from dflop_jax.generate.programs import AnswerPrograms
from dflop_jax.generate.row import pack_rows as samples_in_rows
from dflop_jax.generate.sampling import Sampling
from dflop_jax.verify.samples import mixed_samples
from models import qwen3_vl
from models.hf_sizes import folder_size
from tests.generate.likeliest import assert_likeliest
from tests.verify.folders import random_params

MODEL = qwen3_vl.build("qwen3-vl-nano")
SAMPLES = [m.sample for m in mixed_samples(MODEL)[:3]]  # a picture and a clip, two pictures, text


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("ranks, tp, penalty", [(1, 1, 1.0), (2, 2, 1.0), (2, 1, 1.5)])
def test_a_batch_answers_with_the_likeliest_tokens(ranks, tp, penalty):
    """Text, pictures and a clip in one batch, over data ranks and with a split model. A picture at
    its end takes fewer positions than tokens."""
    n, params = 12, random_params(MODEL, 0)
    mesh = answer_mesh(jax.devices(), tp, ranks)
    assert mesh.shape == {"data": ranks, "model": tp}
    here = {m: jax.tree.map(lambda s, a: jax.device_put(a, s.sharding),
                            param_structs(module, mesh), params[m])
            for m, module in MODEL.modules.items()}  # fmt: skip
    rows = samples_in_rows(SAMPLES, MODEL, ranks, 4 // ranks, 128)
    programs, how = AnswerPrograms(MODEL, mesh), Sampling(n, repetition_penalty=penalty)
    found = np.stack([*programs.tokens(here, rows, np.arange(4, dtype=np.uint32), how)])
    said = [found[:, k % ranks * (4 // ranks) + k // ranks] for k in range(3)]
    for sample, tokens in zip(SAMPLES, said, strict=True):
        assert_likeliest(MODEL, params, sample, tokens, penalty)
    assert len({token for tokens in said for token in tokens.tolist()}) > 8  # else any would do
    if tp > 1:
        kept = here["llm"]["layers"]["key"]["kernel"]
        assert kept.addressable_shards[0].data.size * tp == kept.size


def test_a_published_configuration_is_the_named_size(tmp_path):
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
        ("text_config", "rope_scaling", {"mrope_section": "24"}, "list of whole numbers"),
        ("text_config", "head_dim", 64, "sum 32"),
        ("vision_config", "deepstack_visual_indexes", [8, 8, 24], "must rise"),
        ("vision_config", "deepstack_visual_indexes", [8, 16, 27], "0 to 26"),
        ("vision_config", "out_hidden_size", 32, "must be equal"),
        ("vision_config", "num_position_embeddings", 2305, "no square"),
    ],
)
def test_bad_configurations_are_named(where, key, value, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD))
    assert folder_size(str(tmp_path), "qwen3_vl").vision.deepstack == (8, 16, 24)
    file.write_text(json.dumps(GOOD | {where: GOOD[where] | {key: value}}))
    with pytest.raises(ValueError, match=message) as error:
        folder_size(str(tmp_path), "qwen3_vl")
    assert "\n" not in str(error.value)
