"""Gemma and Qwen3.5 against transformers, every tensor and buffer random: pictures, clips and text,
each run alone there, since Qwen3.5's delta rule on a CPU knows nothing of packed rows; and their
configurations."""

import jax
import pytest
from safetensors.numpy import load_file

from dflop_jax.runtime.layout import make_segments
from dflop_jax.verify.round_trip import split_layout
from dflop_jax.verify.verify import verify
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import gemma, gemma4, gemma4_hf, gemma_hf, qwen3_5, qwen3_5_hf
from tests.verify import gemma_folders, qwen3_5_folders

CAPPED = {"tie_word_embeddings": False, "final_logit_softcapping": 10.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "write, more",
    [
        (gemma_folders.gemma3_text, CAPPED),
        (qwen3_5_folders.qwen3_5, {}),
        (gemma_folders.gemma3, {}),
        (gemma_folders.gemma4, {}),
        (qwen3_5_folders.qwen3_5_text, {"tied": True, "seed": 1}),
    ],
)
def test_parity(tmp_path, write, more):
    folder = write(tmp_path / "it", **more)
    assert len(list(folder.glob("*.safetensors"))) > 1
    result = verify(folder)
    assert (result.not_compared, result.bit_identical, result.exit_code) == ("", True, 0)
    assert result.max_logit_error < 1e-4
    assert result.max_grad_error < 1e-3


@pytest.mark.slow
def test_decays_and_what_is_not_read_stay_as_they_are(tmp_path):
    """Where all else becomes bfloat16."""
    folder = qwen3_5_folders.qwen3_5(tmp_path / "it")
    model = qwen3_5.build(str(folder), dtype="bfloat16")
    source = Folder(folder, model.weights)
    segments = make_segments(model, split_layout(model, 4, model.weights.tensors), jax.devices())
    held = [
        ModuleParams(s.plan.module, read_segment(source, s), s.layer_rows)
        for s in segments.values()
    ]
    write_folder(tmp_path / "half", model.weights, held, source=source, dtype="bfloat16")
    before = {n: a for f in folder.glob("*.safetensors") for n, a in load_file(f).items()}
    after = load_file(tmp_path / "half" / "model.safetensors")
    assert {"mtp.fc", "mtp.norm"} < after.keys() == before.keys()
    whole = {n for n in before if n.endswith(("A_log", "dt_bias"))}
    assert whole == {n for n, a in after.items() if a.dtype == "float32"} != set()
    assert all(before[n].tobytes() == after[n].tobytes() for n in whole)


OLD = {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "sliding_window_pattern": 3}


def test_older_spellings_of_a_configuration():
    """Published folders of Gemma 3 name bases and the pattern otherwise."""
    text = gemma_folders.text3()
    del text["rope_parameters"]
    old = text | OLD | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    size = gemma_hf.read_gemma3_text(old).decoder
    assert size.kinds == ("sliding", "sliding", "global") * 2 + ("sliding",)
    whole, sliding = size.global_heads, size.sliding_heads
    assert (whole.theta, whole.position_factor) == (5e5, 8.0)
    assert (sliding.theta, sliding.position_factor, sliding.window) == (2e3, 1.0, 9)


@pytest.mark.parametrize(
    "build, read, names",
    [
        (gemma.build, gemma_hf.read_gemma3, "gemma3-4b gemma3-nano"),
        (gemma.build_text, gemma_hf.read_gemma3_text, "gemma3-1b gemma3-text-nano"),
        (gemma4.build, gemma4_hf.read_gemma4, "gemma4-31b gemma4-nano"),
        (qwen3_5.build, qwen3_5_hf.read_qwen3_5, "qwen3.5-4b qwen3.5-nano"),
        (qwen3_5.build_text, qwen3_5_hf.read_qwen3_5_text, "qwen3.5-text-4b qwen3.5-text-nano"),
    ],
)
def test_a_size_comes_back_from_its_configuration(build, read, names):
    for model in map(build, names.split()):
        config = model.weights.config
        assert read(config) == model.size
        assert model.weights.mismatches(config) == []


@pytest.mark.slow
def test_both_forms_of_gemma_4s_configuration():
    """As published, and as transformers writes it again."""
    published = gemma_folders.text4()
    written = gemma_folders.transformers_().Gemma4TextConfig(**published).to_dict()
    assert ("per_layer_config" in written, "global_head_dim" in written) == (True, False)
    assert gemma4_hf.read_gemma4_text(written) == gemma4_hf.read_gemma4_text(published)


def test_what_a_configuration_may_leave_out():
    size = qwen3_5_hf.read_qwen3_5_text({"model_type": "qwen3_5_text"}).decoder
    assert (size.mrope_sections, size.rotary_size, size.tied) == ((11, 11, 10), 64, False)
    assert size.kinds == ("linear", "linear", "linear", "full") * 8
    short = {"full_attention_interval": 3, "num_hidden_layers": 4}
    kinds = qwen3_5_hf.read_qwen3_5_text(short).decoder.kinds
    assert kinds == ("linear", "linear", "full", "linear")


def whole4(**more):
    return {"text_config": gemma_folders.text4(), **more}


REFUSED = {
    (gemma4_hf.read_gemma4, whole4): [
        ({"audio_config": {"hidden_size": 8}}, "audio_config: audio is not supported")
    ],
    (gemma4_hf.read_gemma4_text, gemma_folders.text4): [
        ({"hidden_size_per_layer_input": 256}, "per-layer embeddings .*E-forms"),
        ({"num_kv_shared_layers": 2}, "share keys and values .*E-forms"),
        ({"enable_moe_block": True}, "experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "equal heads"),
        ({"per_layer_config": {"2": {"sliding_window": 64}}}, "per_layer_config.2 has"),
    ],
    (gemma_hf.read_gemma3_text, gemma_folders.text3): [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must be 7"),
        ({"layer_types": ["chunked"] * 7}, "layer_types must be 7"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn' is not supported"),
    ],
    (qwen3_5_hf.read_qwen3_5_text, qwen3_5_folders.text): [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["linear_attention"]}, "each of the 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"linear_num_value_heads": 3}, "must divide"),
        ({"rope_parameters": {"mrope_section": [3, 3, 3]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"partial_rotary_factor": 0.1, "rope_parameters": {}}, "partial_rotary_factor"),
    ],
}


@pytest.mark.parametrize(
    "read, config, said",
    [(read, of(**more), said) for (read, of), rows in REFUSED.items() for more, said in rows],
)
def test_what_is_not_built_is_refused_by_name(read, config, said):
    with pytest.raises(ValueError, match=said):
        read(config)
