"""Parquet and Arrow files hold the same records as a JSON file, found again by their row."""

from __future__ import annotations

import json
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import make_source
from dflop_jax.data.datasets import tables
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.media.mel import MelSpec
from tests.data.media_cases import made_dataset
from tests.data.views import media_spec

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
SPEC = media_spec(28, 4, "dynamic", sound=MelSpec(n_mels=4, window_s=1, max_windows=3))


def embedded(dataset: Path) -> list[dict]:
    """Its records with the bytes of their media, as `datasets` embeds them."""
    rows = []
    for record in json.loads(dataset.read_text()):
        row = {"id": record["id"], "conversations": record["conversations"]}
        for kind in ("image", "video", "audio"):
            names = record.get(kind) or []
            names = names if isinstance(names, list) else [names]
            row[f"{kind}s"] = [
                {"bytes": (dataset.parent / name).read_bytes(), "path": name} for name in names
            ]
        rows.append({**row, "unused": [1.5] * 3})
    return rows


def save_parquet(rows, file, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file


def save_arrow(rows, file, rows_at_once=5, new=pa.ipc.new_stream):
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with new(str(file), table.schema) as out:
        out.write_table(table, max_chunksize=rows_at_once)
    return file


def save_to_disk(rows, folder):
    """As `datasets` does."""
    half = len(rows) // 2
    names = [f"data-{k:05d}-of-00002.arrow" for k in range(2)]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        save_arrow(part, folder / "train" / name)
    save_arrow(rows[:1], folder / "train" / "cache-1.arrow")
    save_arrow(rows[:1], folder / "test" / "data-00000-of-00001.arrow")
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "train" / "state.json").write_text(json.dumps(state))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a JSON dataset, its records with embedded media)"""
    file = made_dataset(tmp_path_factory.mktemp("made"), 15)
    return file, embedded(file)


def sources(config, spec, folder):
    return make_source(config, spec, index_dir=folder, vocab_size=512, in_processes=False)


LAYOUTS = {
    "one file": lambda rows, f: save_parquet(rows, f / "a.parquet", row_group_size=4),
    "splits": lambda rows, f: [
        save_parquet(rows[:4], f / "data" / "train-00000-of-00002.parquet", compression="zstd"),
        save_parquet(rows[4:], f / "data" / "train-00001-of-00002.parquet", row_group_size=3),
        save_parquet(rows, f / "data" / "test-00000-of-00001.parquet"),
    ],
    "saved": save_to_disk,
    "arrow file": lambda rows, f: save_arrow(rows, f / "a.arrow", 4, pa.ipc.new_file),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_give_the_samples_of_the_json_file(made, tmp_path, layout, monkeypatch):
    monkeypatch.setattr(tables, "MAX_BATCH_ROWS", 2)
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 100_000)
    file, rows = made
    LAYOUTS[layout](rows, tmp_path / "d")
    options = {"max_tokens": 4096, "max_frames": 4, "max_tiles": 4, "max_bad_fraction": 0.0}
    plain, table = (
        sources(DataConfig(path=str(path), **options), SPEC, tmp_path / name)
        for path, name in ((file, "i"), (tmp_path / "d", "j"))
    )
    assert len(plain) == len(table) == 15
    assert [plain.load(i) for i in range(15)] == [table.load(i) for i in range(15)]
    for i in (14, 0, 13, 7, 7, 3, 2):  # in any order
        one, other = plain.sample(i), table.sample(i)
        for module, named in one.fields.items():
            for name, array in named.items():
                np.testing.assert_array_equal(array, other.fields[module][name])
    assert not list(tmp_path.glob("d/**/*.npz"))


@pytest.mark.parametrize("save", [save_parquet, save_arrow])
def test_media_below_the_roots_and_columns_of_other_names(made, tmp_path, save):
    file, _ = made
    rows = [
        {"key": r["id"], "pics": r.get("image") if isinstance(r.get("image"), str) else None,
         "chat": json.dumps(r["conversations"]), "messages": "another"}
        for r in json.loads(file.read_text())[:2]
    ]  # fmt: skip
    suffix = ".parquet" if save is save_parquet else ".arrow"
    table = save(rows, tmp_path / "x" / f"a{suffix}")
    names = {"id": "key", "image": "pics", "conversations": "chat"}
    reader, plain = open_reader(table, [file.parent], names), open_reader(file)
    for one, other in zip(reader.locate(), plain.locate(), strict=False):
        found, expected = reader.read(one), plain.read(other)
        assert (found.turns, found.media) == (expected.turns, expected.media)
        assert found.name.removeprefix(one.label) == expected.name.removeprefix(other.label)
    outside = open_reader(table, (), names)
    with pytest.raises(ValueError, match=r"a\.(parquet|arrow)\[1\] id=r1: missing file"):
        outside.read(list(outside.locate())[1])
    other = open_reader(table, (), names | {"image": "images"})
    with pytest.raises(ValueError, match="no column 'images'; there are key, pics, chat, messages"):
        list(other.locate())
    with pytest.raises(ValueError, match="no column conversations or messages or question, there"):
        list(open_reader(save([{"n": 1}], tmp_path / f"n{suffix}")).locate())


def test_what_a_folder_holds_is_named_or_refused(made, tmp_path):
    _, rows = made

    def why(folder):
        with pytest.raises(ValueError, match=r"^.+$") as error:
            open_reader(folder)
        return str(error.value)

    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("a", "b"):
        save_parquet(rows[:1], folder / name / "x.parquet")
    assert "holds several datasets, name one: a, b" in why(folder)
    save_parquet(rows[:1], tmp_path / "s" / "test-0.parquet")
    save_parquet(rows[:1], tmp_path / "s" / "validation-0.parquet")
    assert "holds splits test, validation; name the files" in why(tmp_path / "s")
    assert len(open_reader(tmp_path / "s" / "val*.parquet").files) == 1
    for name in ("train-0", "test-0"):  # the only folder in a folder is read as if it were named
        save_parquet(rows[:1], tmp_path / "one" / "default" / f"{name}.parquet")
    (file,) = open_reader(tmp_path / "one").files
    assert file.name == "train-0.parquet"
    save_parquet(rows[:1], tmp_path / "p" / "train-00001-of-00003.parquet")
    assert "2 of 3 files are missing, e.g. train-00000-of-00003.parquet, " in why(tmp_path / "p")
    assert "no file matches" in why(tmp_path / "p" / "x*.parquet")
    save_to_disk(rows[:2], tmp_path / "t")
    (tmp_path / "t" / "train" / "data-00001-of-00002.arrow").unlink()
    assert "1 of 2 files are missing" in why(tmp_path / "t")
    (tmp_path / "t" / "train" / "state.json").write_text("[]")
    assert "names no data files" in why(tmp_path / "t")


def test_without_the_library_one_line_says_what_to_install(made, tmp_path, monkeypatch):
    file = save_parquet(made[1][:1], tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    tables.import_pyarrow.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'dflop_jax\[parquet\]'"):
        open_reader(file)
    tables.import_pyarrow.cache_clear()


def every_record(path):
    reader = open_reader(path)
    return [reader.read(at) for at in reader.locate()]


def test_files_that_lie_are_one_line(made, tmp_path):
    good = save_parquet(made[1] * 3, tmp_path / "a.parquet", row_group_size=9).read_bytes()
    footer, huge = int.from_bytes(good[-8:-4], "little"), struct.pack("<I", 2**31 - 1)
    bad = tmp_path / "b.parquet"
    for data in (b"", b"PAR1", good[:-300], good[:-8] + huge + b"PAR1",
                 good[:-8] + struct.pack("<I", len(good) - 20) + b"PAR1",
                 good[: -8 - footer] + b"\xff" * footer + good[-8:]):  # fmt: skip
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"b\.parquet: cannot be read \(.*\)$"):
            every_record(bad)
    good = save_arrow(made[1] * 2, tmp_path / "a.arrow", 7).read_bytes()
    bad, length = tmp_path / "b.arrow", int.from_bytes(good[4:8], "little")
    for data in (b"", b"ARROW1\0\0", good[:100], good[: len(good) // 2], b"x" * 100,
                 good[:4] + huge + good[8:], good[8 + length :],
                 good[:8] + b"\xff" * length + good[8 + length :]):  # fmt: skip
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"b\.arrow: (cannot be read|holds no rows).*$"):
            every_record(bad)
    table = pa.table({"question": pa.array(["x"]).dictionary_encode()})
    with pa.ipc.new_stream(str(bad), table.schema) as out:
        out.write_table(table)
    with pytest.raises(ValueError, match="it has more than plain columns; save it as Parquet"):
        every_record(bad)


def asked(n):
    return [{"question": f"What is {k}?"} for k in range(n)]


def test_rows_that_the_pages_lack_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_BATCH_ROWS", 20)
    read = tables.TableFile(save_parquet(asked(45), tmp_path / "a.parquet"))
    read._first_rows = [0, 50]  # as a footer that lies has it
    for number in (39, 44):
        assert read.row(number) == asked(45)[number]
    for number in (45, 49):
        with pytest.raises(ValueError, match="group 0 has fewer rows than the file claims"):
            read.row(number)
    assert read.row(41) == asked(45)[41]
    with pytest.raises(ValueError, match="there are 50 rows now"):
        read.row(50)


@pytest.mark.parametrize("kept_bytes", [1, 1200])
def test_threads_read_one_file_together(tmp_path, monkeypatch, kept_bytes):
    monkeypatch.setattr(tables, "MAX_BATCH_ROWS", 3)
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", kept_bytes)
    n = 120
    read = tables.TableFile(save_parquet(asked(n), tmp_path / "a.parquet", row_group_size=40))
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(n), 5)).tolist()
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(read.row, order)] == [asked(n)[k] for k in order]
    kept = sum(batch.get_total_buffer_size() for _, batch in read._cached)
    assert kept <= kept_bytes or len(read._cached) == 1
