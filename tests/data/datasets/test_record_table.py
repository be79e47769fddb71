"""The index file: what it keeps, when it is made anew, and that nothing is decoded for it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image

from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.index_build import IndexRules, LocalRowReader, update_index
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.record_table import DatasetIndex, build_table, load_index, save_index
from dflop_jax.data.text.tokenize import encode_chatml
from tests.data.media_cases import made_dataset, write_clip, write_wav


def pieces(turns, _=None):
    return encode_chatml(turns, ByteTokenizer())


def index_of(reader):
    """The index of a dataset, made here."""
    with TemporaryDirectory() as folder:
        here = partial(LocalRowReader, {"a": reader}, pieces)
        rules = IndexRules(Path(folder) / "index.npz", "bytes", here)
        return update_index(rules, {"a": reader})["a"]


def rows(table):
    """Each record as (number, text, needed text, media)."""
    columns, facts = ["number", "text_tokens", "needed_tokens"], ("width", "frames", "samples")
    return [
        (*table.records[columns][i].item(),
         [(kind.name, *(header.get(k, 0) for k in facts)) for kind, header in table.headers(i)])
        for i in range(len(table))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return made_dataset(tmp_path_factory.mktemp("made"))


def test_headers_and_tokens_of_each_kind(dataset):
    found = rows(index_of(open_reader(dataset)).table)
    assert [r[0] for r in found] == list(range(12))
    assert [r[3] for r in found[:5]] == [
        [],
        [("image", 768, 0, 0)],
        [("image", 300, 0, 0), ("image", 310, 0, 0), ("image", 45, 0, 0)],
        [("video", 64, 5, 0)],  # 9 frames at 4 a second, sampled at 2
        [("audio", 0, 0, 60_000)],
    ]
    text = "user\nSay <b>.\nassistant\nOne."  # and <|im_start|> and <|im_end|> twice
    assert found[0][1:3] == (len(text) + 4,) * 2


def test_only_what_changed_is_made_anew(dataset, tmp_path):
    calls = []

    def counted(turns, _=None):
        calls.append(turns)
        return pieces(turns)

    other = made_dataset(tmp_path / "other", 3)
    file = tmp_path / "index.npz"
    readers = {"a": open_reader(dataset), "b": open_reader(other)}

    def update(settings="bytes"):
        calls.clear()
        update_index(IndexRules(file, settings, partial(LocalRowReader, readers, counted)), readers)
        return len(calls)

    assert update() == 15
    written = file.stat().st_mtime_ns
    assert update() == 0
    assert file.stat().st_mtime_ns == written
    os.utime(other, ns=(1, 1))
    assert update() == 3
    other.write_text(json.dumps(json.loads(other.read_text())[:2]))
    os.utime(other, ns=(1, 1))  # the same time, another size
    assert update() == 2
    assert update("another tokenizer") == 14


def test_media_that_changed_under_their_names_are_read_again(tmp_path, caplog):
    """And those that were missing or broken when the index was made."""
    path = made_dataset(tmp_path, 5)
    records = json.loads(path.read_text())
    records[2]["image"][2] = "late.png"
    path.write_text(json.dumps(records))
    (tmp_path / "exact.png").write_bytes(b"cut")
    (later := tmp_path / "later").mkdir()
    file, readers = tmp_path / "index.npz", {"a": open_reader(path, [tmp_path, later])}

    def found(**how):
        made = partial(LocalRowReader, readers, pieces)
        return rows(update_index(IndexRules(file, "bytes", made, **how), readers)["a"].table)

    def picture(name, width):
        Image.new("RGB", (width, 9)).save(tmp_path / name)

    assert [r[0] for r in found()] == [0, 3, 4]
    picture("exact.png", 20)
    assert "id=r1" in caplog.text
    assert [r[0] for r in found(check_media=False)] == [0, 3, 4]
    assert found()[1][3] == [("image", 20, 0, 0)]
    picture("later/late.png", 30)
    assert found()[2][3][2] == ("image", 30, 0, 0)
    write_wav(tmp_path / "a.wav", np.zeros((1, 8000)), 8000)
    assert found()[4][3] == [("audio", 0, 0, 16_000)]
    state = os.stat(tmp_path / "a.mp4")
    write_clip(tmp_path / "a.mp4", 3)
    os.utime(tmp_path / "a.mp4", ns=(1, state.st_mtime_ns))  # the same time, another size
    assert found()[3][3] == [("video", 64, 2, 0)]
    assert "1 files of media changed since they were indexed" in caplog.text
    written = file.stat().st_mtime_ns
    found()
    assert file.stat().st_mtime_ns == written
    (tmp_path / "a.wav").unlink()
    assert [r[0] for r in found()] == [0, 1, 2, 3]


def test_a_damaged_index_is_named_and_made_anew(dataset, tmp_path, caplog):
    file, readers = tmp_path / "index.npz", {"a": open_reader(dataset)}
    rules = IndexRules(file, "bytes", partial(LocalRowReader, readers, pieces))
    expected = rows(update_index(rules, readers)["a"].table)
    good, rng = file.read_bytes(), np.random.default_rng(0)
    for damage in ("", "cut", *["flip"] * 4):
        data = bytearray(good[:-200] if damage == "cut" else good if damage else b"")
        if damage == "flip":
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        if damage != "flip":  # a bit may not count
            with pytest.raises(ValueError, match=r"index\.npz: damaged index "):
                load_index(file)
        assert rows(update_index(rules, readers)["a"].table) == expected
        assert rows(load_index(file)["a"].table) == expected
    assert "damaged index" in caplog.text


def test_an_index_of_another_version_is_not_taken(tmp_path, monkeypatch):
    file = tmp_path / "index.npz"
    monkeypatch.setattr("dflop_jax.data.datasets.record_table.VERSION", 0)
    save_index(file, {"ä/b": DatasetIndex("k", build_table([], []), 3, ("why",))})
    assert [p.name for p in tmp_path.iterdir()] == ["index.npz"]
    (again,) = load_index(file).values()
    assert ([*again.bad], again.listed, len(again.table)) == (["why"], 3, 0)
    monkeypatch.undo()
    assert load_index(file) == load_index(tmp_path / "none.npz") == {}
