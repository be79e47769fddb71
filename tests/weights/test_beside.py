"""Which tokenizer, template and processors lie beside exported tensors."""

import pytest

from dflop_jax.weights.write import copy_beside

TEXT = {"tokenizer.json": "t", "tokenizer_config.json": "c", "chat_template.jinja": "j",
        "generation_config.json": "g"}  # fmt: skip


def made(folder, files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(f"{folder.name} {text}")
    return folder


@pytest.fixture
def llm(tmp_path):
    return made(tmp_path / "llm", {**TEXT, "config.json": "x", "model.safetensors": "w",
                                   "model.safetensors.index.json": "i"})  # fmt: skip


@pytest.fixture
def tower(tmp_path):
    return made(tmp_path / "tower", {"preprocessor_config.json": "p", "tokenizer.json": "other",
                                     "spiece.model": "s", "config.json": "y"})  # fmt: skip


def copied(tmp_path, *folders):
    target = tmp_path / "out"
    target.mkdir()
    copy_beside(target, folders)
    return {f.name: f.read_text() for f in target.iterdir()}


def test_text_is_of_one_folder_and_processors_of_any(tmp_path, llm, tower):
    texts = {name: f"llm {text}" for name, text in TEXT.items()}
    assert copied(tmp_path, llm, tower) == {**texts, "preprocessor_config.json": "tower p"}


def test_the_first_with_a_tokenizer_counts(tmp_path, llm, tower):
    assert copied(tmp_path, tmp_path / "gone", tower, llm) == {
        "tokenizer.json": "tower other", "spiece.model": "tower s",
        "preprocessor_config.json": "tower p",
    }  # fmt: skip


def test_without_a_tokenizer_what_is_there_is_copied(tmp_path, tower):
    plain = made(tmp_path / "plain", {"scheduler_config.json": "d", "config.json": "x"})
    assert copied(tmp_path, plain) == {"scheduler_config.json": "plain d"}
    copy_beside(tmp_path / "gone", [])
