"""The index made in processes: the same as made here, but for records that hurt, named."""

from __future__ import annotations

import json
import logging
import tarfile
from functools import partial

import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, make_source
from dflop_jax.data.build import open_source
from dflop_jax.data.datasets.index_build import IndexRules, update_index
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.row_reader import LocalRowReader, ProcessRowReader
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.sample import SourceFactory
from dflop_jax.data.text.tokenize import encode_chatml
from tests.data.media_cases import add_bytes, made_dataset, make_shards
from tests.data.views import media_spec

TIMEOUT_S = 6.0  # of what hangs; a record takes far less on any machine
MEMORY = 256 << 20


def here(reader):
    return LocalRowReader({"a": reader}, lambda turns, _: encode_chatml(turns, ByteTokenizer()))


def hostile(path, harm):
    opens = "tests.data.pool.hostile_source:open_hostile_rows"
    factory = SourceFactory(opens, {"path": str(path), "harm": harm})
    return partial(ProcessRowReader, factory, TIMEOUT_S, MEMORY)


def listed(table):
    """All that a table says, record by record."""
    return [(facts, table.headers(i)) for i, facts in enumerate(table.records.tolist())]


def test_the_same_index_as_made_here(tmp_path):
    """Of shards; tests/data/datasets/test_tables.py does so with tables."""
    path = made_dataset(tmp_path / "d", 30)
    records = json.loads(path.read_text())
    records[3]["conversations"] = []
    records[7].pop("image")
    path.write_text(json.dumps(records))
    make_shards(path, tmp_path / "s", 7)
    with tarfile.open(tmp_path / "s" / "t.tar", "w") as tar:
        add_bytes(tar, "no \udcff unicode.json", json.dumps(records[0]).encode())
        add_bytes(tar, "neither \udcff.json", b"[]")
    path = tmp_path / "s"
    config = DataConfig(path=str(path), max_tokens=4096, max_bad_fraction=0.2)
    indexes = []
    for apart in (False, True):
        folder = tmp_path / str(apart)
        source = make_source(
            config,
            media_spec(32, 4, sound=MelSpec()),
            index_dir=folder,
            vocab_size=512,
            in_processes=apart,
        )
        (file,) = folder.iterdir()
        indexes.append((source.counts, file.name, file.read_bytes()))
    assert indexes[0][0]["unusable"] == 3
    assert indexes[0] == indexes[1]


def test_processes_that_decode_take_the_index_as_it_is(tmp_path):
    """Whoever made the source has looked for media that changed; others could come to another."""
    path = made_dataset(tmp_path / "d", 5)
    config, spec = DataConfig(path=str(path), max_tokens=4096), media_spec(32, 4, sound=MelSpec())
    made = make_source(config, spec, index_dir=tmp_path / "i", vocab_size=512, in_processes=False)
    (file,) = (tmp_path / "i").iterdir()
    before = file.read_bytes()
    (tmp_path / "d" / "a.wav").write_bytes(b"")
    assert len(open_source(made.factory.arguments)) == 5
    assert file.read_bytes() == before


@pytest.mark.slow
def test_records_that_hurt_are_named_and_the_others_are_there(tmp_path, caplog):
    path = made_dataset(tmp_path / "d", 80)
    harm = {"2": "die", "5": "hang", "6": f"die once:{tmp_path}/died", "7": "warn",
            "9": f"eat:{4 * MEMORY}", "70": "die", "71": "die"}  # fmt: skip
    reader = open_reader(path)
    plain = update_index(IndexRules(tmp_path / "i", "", lambda: here(reader)), {"a": reader})["a"]
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        made = update_index(IndexRules(tmp_path / "j", "", hostile(path, harm)), {"a": reader})["a"]
    assert (tmp_path / "died").exists()
    assert (plain.listed, made.listed, len(plain.table)) == (80, 80, 80)
    hurt = [2, 5, 9, 70, 71]
    assert listed(made.table) == [r for k, r in enumerate(listed(plain.table)) if k not in hurt]
    assert [reason.split("]")[0] for reason in made.bad] == [f"dataset.json[{k}" for k in hurt]
    why = dict(zip(hurt, made.bad, strict=True))
    assert "decoding it ended the process (signal 11)" in why[2]
    assert "not decoded within data.sample_timeout_s=6" in why[5]
    assert "number 9 eats memory" in why[9]
    said = [r.getMessage() for r in caplog.records]
    assert said.count("odd") == 1
    assert sum(s.startswith("left out ") for s in said) < len(made.bad)
    (file,) = tmp_path.glob("j*.unusable.txt")
    assert file.read_text().splitlines() == list(made.bad)


def test_an_error_of_the_program_ends_it_and_says_where(tmp_path):
    path = made_dataset(tmp_path / "d", 3)
    rules = IndexRules(tmp_path / "i", "", hostile(path, {"1": "bug"}))
    with pytest.raises(
        RuntimeError, match=r"json\[0\] and 2 after it: (?s:.*)ZeroDivisionError: a bug"
    ):
        update_index(rules, {"a": open_reader(path)})
    assert not (tmp_path / "i").exists()
