"""Writing a folder: files by size, from segments, whole or not at all."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflop_jax import weights
from dflop_jax.runtime.layout import make_segments
from dflop_jax.weights import Folder, ModuleParams, write, write_adapter, write_folder
from dflop_jax.weights.adapter import to_file_pair
from dflop_jax.weights.write import copy_processor_files
from models import hf, llava
from models.composed import PublishedComposition
from models.sizes import ModelSize, VisionSize

from .conftest import DECODER, KERNELS, MODEL, PLAN, held, random_params


def test_an_independent_reader_finds_every_tensor(folder, params):
    """The safetensors library itself, and the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {f.name: load_file(f) for f in folder.glob("*.safetensors")}
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    assert all(name in files[file] for name, file in index["weight_map"].items())
    arrays = {n: a for f in files.values() for n, a in f.items()}
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    assert sorted(arrays) == sorted(t.name for t in MODEL.weights.tensors)
    up = arrays["language_model.model.layers.2.mlp.up_proj.weight"]
    np.testing.assert_array_equal(up, params["llm"]["layers"]["up"]["kernel"][2].T)
    token = arrays["vision_tower.embeddings.cls_token"]
    np.testing.assert_array_equal(token[0, 0], params["vision"]["entry"]["class_token"])


def test_segments_are_written_as_the_model(folder, tmp_path):
    source = Folder(folder, MODEL.weights)
    pieces = [
        ModuleParams(s.plan.module, weights.read_segment(source, s), s.layer_rows)
        for s in make_segments(MODEL, PLAN.layout, jax.devices()).values()
    ]
    write_folder(tmp_path / "out", MODEL.weights, pieces, source=source, max_file_bytes=60_000)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == sorted(
        f.name for f in folder.iterdir()
    )
    for file in folder.glob("*.safetensors*"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_what_the_source_has_beside_the_model_is_kept(tmp_path):
    """Tensors without use here, in the spelling and with the values of the source."""
    vision = VisionSize(8, 4, 8, 1, 2, 8, post_norm=False)
    model = PublishedComposition(ModelSize(DECODER, vision, layout="anyres"), MODEL.dtype)
    params = random_params(model, 4)
    write_folder(tmp_path / "a", model.weights, held(params))
    file = tmp_path / "a" / "model.safetensors"
    arrays = load_file(file)
    np.testing.assert_array_equal(arrays["image_newline"], params["llm"]["entry"]["image_newline"])
    name = "vision_tower.post_layernorm.weight"
    np.testing.assert_array_equal(arrays.pop(name), np.ones(8))
    scale = np.arange(8, dtype=np.float16)
    save_file(arrays | {f"model.{name}": scale}, file)

    source = Folder(tmp_path / "a", model.weights)
    source.check()
    write_folder(tmp_path / "b", model.weights, held(params), source=source)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == {*arrays, f"model.{name}"}
    assert again[f"model.{name}"].dtype == np.float16
    np.testing.assert_array_equal(again[f"model.{name}"], scale)


def test_nothing_is_left_of_a_failure(params, tmp_path, monkeypatch):
    broken = [
        ModuleParams("vision", params["vision"]),
        ModuleParams("llm", params["llm"] | {"exit": {}}),
    ]
    with pytest.raises(ValueError, match=r"llm\.exit.*every segment") as e:
        write_folder(tmp_path / "out", MODEL.weights, broken)
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(write, "copy_processor_files", full)
    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "out", MODEL.weights, held(params))
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_and_unknown_types_are_refused(folder, params, tmp_path):
    before = sorted(f.name for f in folder.iterdir())
    with pytest.raises(ValueError, match="exists already"):
        write_folder(folder, MODEL.weights, held(params))
    assert sorted(f.name for f in folder.iterdir()) == before
    with pytest.raises(ValueError, match="'int8'; known: float32, bfloat16, float16"):
        write_folder(tmp_path / "out", MODEL.weights, held(params), dtype="int8")


def test_no_head_of_its_own_when_tied(tmp_path):
    """A copy in the source is left out: it would be stale after training."""
    module = llava.build("nano").modules["llm"]
    map_ = hf.decoder_weights(module)
    both = random_params(llava.build("nano"), 3)
    write_folder(tmp_path / "a", map_, held(both))
    file = tmp_path / "a" / "model.safetensors"
    arrays = load_file(file)
    assert "lm_head.weight" not in arrays
    save_file(arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}, file)
    source = Folder(tmp_path / "a", map_)
    source.check()
    write_folder(tmp_path / "b", map_, held(both), source=source)
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == arrays.keys()

    # A head that differs must not get lost.
    save_file(arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        Folder(tmp_path / "a", map_).check()


# ---- adapters ----


@pytest.mark.parametrize("layout", KERNELS)
def test_adapters_are_products_in_the_layout_of_the_file(layout):
    """B times A, as peft adds it, is what the adapter adds to the kernel, as the kernel is written;
    of a file's dims the first are the outputs."""
    n_in = len(layout.shape) - len(layout.splits[0])
    rng = np.random.default_rng(0)
    a = rng.normal(size=(*layout.shape[:n_in], 3))
    b = rng.normal(size=(3, *layout.shape[n_in:]))
    t = SimpleNamespace(layout=layout, name="kernel", layer=None)
    file_a, file_b = to_file_pair(t, a, b)
    product = file_b.reshape(len(file_b), 3) @ file_a.reshape(3, -1)
    want = weights.to_file_layout(t, np.tensordot(a, b, axes=1), None, np.dtype(float))
    np.testing.assert_allclose(product.reshape(want.shape), want, atol=1e-12)


def test_adapters_that_cannot_be_written_are_refused(tmp_path):
    model = MODEL
    with pytest.raises(ValueError, match=r"no adapters to write; train with train\.lora_rank"):
        write_adapter(tmp_path / "a", model.weights, {"llm": {}}, rank=2, alpha=1.0)
    odd = {"llm": {"adapter": {"gait": {}}}}
    with pytest.raises(ValueError, match=r"no matrix for the adapters llm\.adapter\.gait"):
        write_adapter(tmp_path / "a", model.weights, odd, rank=2, alpha=1.0)
    with pytest.raises(ValueError, match=r"unknown dtype of weights 'int4'"):
        write_adapter(tmp_path / "a", model.weights, odd, rank=2, alpha=1.0, dtype="int4")
    assert not list(tmp_path.iterdir())


# ---- which tokenizer, template and processors lie beside the tensors ----

TEXT = {"tokenizer.json": "t", "tokenizer_config.json": "c", "chat_template.jinja": "j",
        "generation_config.json": "g"}  # fmt: skip


def made(folder, files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(f"{folder.name} {text}")
    return folder


def test_texts_come_from_one_folder_and_processors_from_any(tmp_path):
    """Texts from the first with a tokenizer, else what is there."""
    llm = made(tmp_path / "llm", {**TEXT, "config.json": "x", "model.safetensors": "w",
                                  "model.safetensors.index.json": "i"})  # fmt: skip
    tower = made(tmp_path / "tower", {"preprocessor_config.json": "p", "tokenizer.json": "other",
                                      "spiece.model": "s", "config.json": "y"})  # fmt: skip
    plain = made(tmp_path / "plain", {"scheduler_config.json": "d", "config.json": "x"})
    texts = {name: f"llm {text}" for name, text in TEXT.items()}
    tower_texts = {"tokenizer.json": "tower other", "spiece.model": "tower s"}
    processors = {"preprocessor_config.json": "tower p"}
    for i, (folders, want) in enumerate((
        ((llm, tower), texts | processors),
        ((tmp_path / "gone", tower, llm), tower_texts | processors),
        ((plain,), {"scheduler_config.json": "plain d"}),
        ((tmp_path / "gone",), {}),
    )):  # fmt: skip
        target = tmp_path / f"out{i}"
        target.mkdir()
        copy_processor_files(target, folders)
        assert {f.name: f.read_text() for f in target.iterdir()} == want
