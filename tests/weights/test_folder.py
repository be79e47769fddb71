"""Folders that are not what they should be: one line that names the file, the key, the remedy."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflop_jax.weights import Folder, write_folder

from .conftest import MODEL, held

NORM = "language_model.model.norm.weight"


@pytest.fixture
def single(params, tmp_path):
    """A fresh folder of one file, to be damaged."""
    path = tmp_path / "model"
    write_folder(path, MODEL.weights, held(params))
    return path


def edited(path, change):
    file = path / "model.safetensors"
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file)


def said(path):
    with pytest.raises(ValueError) as e:  # noqa: PT011  (the caller looks at all of it)
        Folder(path, MODEL.weights).check()
    text = str(e.value)
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a: a.pop(NORM), ["no tensor", NORM, "incomplete"]),
        (lambda a: [a.pop(n) for n in list(a) if "vision_tower" in n], ["vision_tower", " more"]),
        (lambda a: a.update(extra=a[NORM]), ["unexpected", "'extra'", "another model"]),
        (lambda a: a.update({NORM: a[NORM][:-1]}), [NORM, "[31]", "[32]", "choose the model size"]),
        (lambda a: a.update({NORM: a[NORM].reshape(1, -1)}), [NORM, "[1, 32]", "[32]"]),
        (lambda a: a.update({NORM: a[NORM].astype(np.float64)}), [NORM, "F64", "convert"]),
        (lambda a: a.update({NORM: a[NORM].astype(np.int8)}), [NORM, "I8", "dequantised"]),
        (lambda a: a.update({f"model.{NORM}": a[NORM]}), [f"'model.{NORM}'", "same tensor"]),
    ],
)
def test_a_wrong_tensor_is_named(single, change, words):
    edited(single, change)
    text = said(single)
    assert all(w in text for w in words), text


@pytest.mark.parametrize(
    "where, value, words",
    [
        (("text_config", "num_key_value_heads"), 4, ["text_config.num_key_value_heads", "4", "2"]),
        (("vision_config", "norm_type"), "layer_norm", ["norm_type", "layer_norm", "rms_norm"]),
        (("text_config", "rope_parameters"), {"rope_theta": 3.0}, ["rope_theta", "3.0"]),
        (("model_type",), "llava", ["model_type", "'llava'", "'internvl'"]),
    ],
)
def test_a_configuration_that_differs_is_named(single, where, value, words):
    file = single / "config.json"
    config = json.loads(file.read_text())
    inner = config
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    file.write_text(json.dumps(config))
    text = said(single)
    assert all(w in text for w in (*words, "config.json")), text


@pytest.mark.parametrize(
    "content", [None, b"\0", b"{}", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"{} bad 1"]
)
def test_a_file_that_is_not_safetensors(single, content):
    file = single / "model.safetensors"
    Folder(single, MODEL.weights).check()
    file.write_bytes(content or file.read_bytes()[:-100])
    assert "not a safetensors file" in said(single)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_configuration(single, text):
    (single / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in said(single)


def test_missing_folders_and_files_are_named(single, tmp_path):
    assert "no such folder" in said(tmp_path / "nowhere")
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "0 safetensors but no" in said(single)
    (single / "config.json").unlink()
    assert "config.json: no such file" in said(single)


def test_two_files_without_an_index(single):
    shutil.copyfile(single / "model.safetensors", single / "adapter.safetensors")
    Folder(single, MODEL.weights).check()  # adapters beside the whole file
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert "2 safetensors but no model.safetensors.index.json" in said(single)


@pytest.mark.parametrize(
    "weight_map, words",
    [
        ({NORM: "gone.safetensors"}, ["gone.safetensors", "no such file"]),
        ({"gone": "part.safetensors"}, ["'gone'", "index"]),
        ({NORM: "../model.safetensors"}, ["same folder"]),
        ({NORM: 3}, ["weight_map"]),
        ([], ["weight_map"]),
    ],
)
def test_a_wrong_index(single, weight_map, words):
    index = single / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    Folder(single, MODEL.weights).check()  # the whole file goes before an index
    (single / "model.safetensors").rename(single / "part.safetensors")
    text = said(single)
    assert all(w in text for w in words), text
