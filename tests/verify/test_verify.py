"""`dflop verify` on small random folders of every family, and what it says of bad ones."""

import json
import shutil
from dataclasses import replace

import jax
import pytest

from dflop_jax.cli import main
from dflop_jax.config import ModelConfig
from dflop_jax.distributed import devices
from dflop_jax.preflight.model_folder import FAMILIES
from dflop_jax.records import Plan
from dflop_jax.records.files import save
from dflop_jax.train.run_context import build_model
from dflop_jax.verify import reference, round_trip
from dflop_jax.verify.round_trip import split_layout
from dflop_jax.verify.verify import VerifyResult
from dflop_jax.weights import Folder, ModuleParams, write_folder
from tests.verify.folders import random_params

SIZES = {
    "llava_onevision": "anyres-nano",
    "internvl": "internvl-nano",
    "qwen2_audio": "qwen2-audio-nano",
    "qwen3_vl": "qwen3-vl-nano",
}
NOTHING_INSTALLED = "torch is not installed"


def small_model(kind):
    return build_model(ModelConfig(FAMILIES[kind], SIZES[kind], "float32"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind, a folder in several files of bfloat16."""
    jax.devices()  # started with conftest's 8
    made = {}
    for kind in SIZES:
        model = small_model(kind)
        held = [ModuleParams(name, tree) for name, tree in random_params(model, 1).items()]
        made[kind] = tmp_path_factory.mktemp("verify") / kind
        write_folder(made[kind], model.weights, held, dtype="bfloat16", max_file_bytes=150_000)
    return made


def verify(capsys, *args):
    """(exit code, answer as JSON, stderr)."""
    capsys.readouterr()
    code = main(["verify", *map(str, args), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


@pytest.fixture
def no_reference(monkeypatch):
    monkeypatch.setattr(reference, "missing_packages", lambda: NOTHING_INSTALLED)


@pytest.mark.parametrize("kind", SIZES)
def test_a_folder_of_every_family_is_read_and_written_alike(folders, capsys, kind, no_reference):
    code, answer, err = verify(capsys, folders[kind])
    assert (code, answer["bit_identical"]) == (0, True)
    assert "error" not in err  # but perhaps how far it is, where it takes long
    groups = {g["name"]: g for g in answer["groups"]}
    assert sum(g["tensors"] for g in groups.values()) == len(small_model(kind).weights.tensors)
    assert groups["llm.layers"]["n_bytes"] > groups["llm.exit"]["n_bytes"] > 0
    assert answer["not_compared"] == NOTHING_INSTALLED
    assert answer["max_logit_error"] is answer["max_grad_error"] is None


needs_reference = pytest.mark.skipif(
    bool(reference.missing_packages()), reason="torch or transformers is not installed"
)


@pytest.mark.slow
@needs_reference
@pytest.mark.parametrize("kind", SIZES)
def test_a_folder_of_every_family_equals_transformers(folders, capsys, kind):
    code, answer, _ = verify(capsys, folders[kind])
    assert (code, answer["not_compared"]) == (0, "")
    assert 0 < answer["max_logit_error"] <= 1e-5
    assert 0 < answer["max_grad_error"] <= 1e-4
    assert all(0 < g["max_grad_error"] <= 1e-4 for g in answer["groups"])


def test_the_shards_of_a_plan_and_a_table(folders, capsys, tmp_path, no_reference):
    model = small_model("internvl")
    save(Plan("verify", split_layout(model, 1, model.weights.tensors)), tmp_path / "plan.json")
    assert main(["verify", str(folders["internvl"]), "--plan-file", f"{tmp_path}/plan.json"]) == 0
    out = capsys.readouterr().out
    assert "vision.layers" in out
    assert "verified; logits and gradients were not compared: torch is not" in " ".join(out.split())
    save(Plan("verify", split_layout(small_model("qwen2_audio"), 1, [])), tmp_path / "plan.json")
    code, _, err = verify(capsys, folders["internvl"], "--plan-file", tmp_path / "plan.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "the model lacks" in err


def test_a_tensor_that_is_read_wrongly_is_found(folders, capsys, monkeypatch, no_reference):
    read = round_trip.read_segment

    def off_by_one_bit(folder, segment):
        params = read(folder, segment)
        if segment.name == "llm0":
            scale = params["layers"]["mlp_norm"]["scale"]
            params["layers"]["mlp_norm"]["scale"] = scale.at[1, 3].multiply(1 + 2**-7)
        return params

    monkeypatch.setattr(round_trip, "read_segment", off_by_one_bit)
    code, answer, _ = verify(capsys, folders["qwen3_vl"])
    assert (code, answer["bit_identical"]) == (1, False)
    wrong = {g["name"]: g["tensors"] - g["identical"] for g in answer["groups"]}
    assert {name: n for name, n in wrong.items() if n} == {"llm.layers": 1}


@pytest.mark.slow
@needs_reference
def test_a_model_that_computes_something_else_is_found(folders, capsys, monkeypatch):
    run = reference.run_reference

    def other(*args, **how):
        there = run(*args, **how)
        changed = {n: a * 1.01 if "mlp.up_proj" in n else a for n, a in there.gradients.items()}
        return replace(there, gradients=changed)

    monkeypatch.setattr(reference, "run_reference", other)
    code, answer, _ = verify(capsys, folders["qwen3_vl"])
    assert (code, answer["bit_identical"]) == (1, True)
    assert answer["max_grad_error"] == pytest.approx(0.01, rel=0.1)
    errors = {g["name"]: g["max_grad_error"] for g in answer["groups"]}
    assert [name for name, e in errors.items() if e > 1e-3] == ["llm.layers"]
    # It was asked in float64 as well, from which its float32 is not far: no excuse.
    logit, gradient = answer["rounding"]
    assert 0 < logit < 1e-5
    assert 0 < gradient < 1e-4


def test_errors_that_fail():
    nan = float("nan")
    for logit, grad, rounding, code in [
        (None, None, None, 0), (9e-6, 9e-5, None, 0), (1.1e-5, 1e-5, None, 1),
        (1e-6, 2e-4, None, 1), (nan, 0.0, None, 1), (0.0, nan, None, 1),
        # A reference that rounds much allows as much.
        (5e-5, 2e-4, (2e-5, 1e-4), 0), (5e-5, 2e-4, (1e-6, 1e-4), 1),
        (5e-5, 2e-4, (2e-5, 1e-5), 1), (9e-6, 9e-5, (1e-7, 1e-7), 0),
    ]:  # fmt: skip
        for identical in (True, False):
            result = VerifyResult("", "", identical, logit, grad, 10.0, "", (), rounding)
            assert result.exit_code == (code if identical else 1)


def test_too_little_memory_is_said(folders, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "missing_packages", lambda: "")
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       3 kB\n")
    code, answer, _ = verify(capsys, folders["internvl"])
    assert (code, answer["max_logit_error"]) == (0, None)
    assert answer["not_compared"].endswith("GB of memory, 0 GB are free")


def test_bad_folders_end_in_one_line(folders, capsys, tmp_path):
    """All that may be wrong with one: see tests/weights."""
    for file, content, says in [
        ("", b"", "no such folder"),
        ("*-00001-*.safetensors", b"no header", "not a safetensors file"),
        ("config.json", b'{"model_type": "bert"}', "'bert' is only a language model; known: "),
        ("config.json", b"{}", "model_type is None"),
    ]:
        if file:
            shutil.copytree(folders["internvl"], tmp_path / "copy", dirs_exist_ok=True)
            (damaged,) = (tmp_path / "copy").glob(file)
            damaged.write_bytes(content)
        code, answer, err = verify(capsys, tmp_path / "copy")
        assert (code, answer, err.count("\n")) == (2, None, 1)
        assert says in err


def test_copies_of_a_tied_tensor_are_compared_whole(folders, tmp_path, capsys, no_reference):
    """The folder repeats the head; what differs lies beyond what opening a folder looks at."""
    from safetensors.numpy import load_file, save_file

    model = small_model("llava_onevision")
    held = [ModuleParams(name, tree) for name, tree in random_params(model, 2).items()]
    write_folder(tmp_path / "tied", model.weights, held)
    file = tmp_path / "tied" / "model.safetensors"
    arrays = load_file(file)
    head = arrays["language_model.model.embed_tokens.weight"].copy()
    for last, code in ((head[-1], 0), (head[-1] + 1, 1)):
        head[-1] = last
        save_file({**arrays, "language_model.lm_head.weight": head}, file)
        Folder(tmp_path / "tied", model.weights).check()
        found, answer, _ = verify(capsys, tmp_path / "tied")
        assert (found, answer["bit_identical"]) == (code, code == 0)
        assert answer["groups"][-1]["name"] == "copies of tied tensors"
