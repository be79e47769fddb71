"""Qwen3.5 against transformers, every tensor random: pictures, clips and text, each run alone
there, since its delta rule on a CPU knows nothing of packed rows."""

import jax
import pytest
from safetensors.numpy import load_file

from dflop_jax.pipeline.layout import make_segments
from dflop_jax.verify.round_trip import spread
from dflop_jax.verify.verify import verify
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import qwen3_5, qwen3_5_hf
from tests.verify import qwen3_5_folders
from tests.verify.folders import check_equal
from tests.verify.qwen3_5_folders import text


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "kind, more",
    [
        ("qwen3_5", {}),
        ("qwen3_5_text", {"tied": True, "seed": 1}),
    ],
)
def test_parity(tmp_path, kind, more):
    folder = getattr(qwen3_5_folders, kind)(tmp_path / "it", **more)
    assert len(list(folder.glob("*.safetensors"))) > 2
    check_equal(verify(folder))


def test_a_folder_comes_back_from_segments(tmp_path):
    """What is not read, too; decays stay float32 where all else is not."""
    folder = qwen3_5_folders.qwen3_5(tmp_path / "it")
    model = qwen3_5.build(str(folder), dtype="bfloat16")
    source = Folder(folder, model.weights)
    source.check()
    plan = spread(model, 4, model.weights.tensors)
    segments = make_segments(model, plan.layout, jax.devices())
    held = [ModuleParams(s.plan.module, read_segment(source, s), s.held_rows)
            for s in segments.values()]  # fmt: skip
    write_folder(tmp_path / "same", model.weights, held, source=source)
    before = {n: a for f in folder.glob("*.safetensors") for n, a in load_file(f).items()}
    after = load_file(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {"mtp.fc", "mtp.norm"} < after.keys()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    write_folder(tmp_path / "half", model.weights, held, source=source, dtype="bfloat16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    whole = {n for n, a in half.items() if a.dtype == "float32"}
    assert whole == {n for n in before if n.endswith(("A_log", "dt_bias"))}
    assert whole


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-9b", "qwen3.5-nano"])
def test_a_size_comes_back_from_its_configuration(name):
    for build in (qwen3_5.build, qwen3_5.build_text):
        alone = build is qwen3_5.build_text
        model = build(name.replace("qwen3.5", "qwen3.5-text") if alone else name)
        config = model.weights.config
        assert qwen3_5_hf.READERS[config["model_type"]](config) == model.size
        assert model.weights.mismatches(config) == []


def test_what_a_configuration_may_leave_out():
    size = qwen3_5_hf.read_text({"model_type": "qwen3_5_text"}).decoder
    assert size.mrope_sections == (11, 11, 10)
    assert size.rotary_size == 64
    assert size.kinds == ("linear", "linear", "linear", "full") * 8
    assert not size.tied
    other = qwen3_5_hf.read_text({"full_attention_interval": 3, "num_hidden_layers": 4}).decoder
    assert other.kinds == ("linear", "linear", "full", "linear")


@pytest.mark.parametrize(
    "more, said",
    [
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
)
def test_what_is_not_built_is_named(more, said):
    with pytest.raises(ValueError, match=said):
        qwen3_5_hf.read_text(text(**more))
