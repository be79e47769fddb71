"""Samples and records that hang, kill or fill their process are named, and nothing else notices."""

from __future__ import annotations

import json
import logging
import os
import signal
import tarfile
import time
from contextlib import closing
from functools import partial

import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import BadSample, ByteTokenizer, make_source
from dflop_jax.data.build import open_source
from dflop_jax.data.datasets import index_build
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.media.mel import MelSpec
from dflop_jax.data.process_pool import DecoderPool, ProcessDecoder
from dflop_jax.data.sample import SourceFactory
from dflop_jax.data.text.tokenize import encode_chatml
from tests.data.hostile_source import Hostile
from tests.data.media_cases import add_bytes, made_dataset, make_shards
from tests.data.views import media_spec
from tests.processes import runs

LONG_S = 300.0  # longer than anything takes on a busy machine
MEMORY = 256 << 20


def opened(source, workers=1, timeout_s=LONG_S, memory_bytes=MEMORY):
    return closing(ProcessDecoder(source, workers, timeout_s, memory_bytes))


def same(a, b):
    """Whether two samples hold the same arrays under the same names."""

    def arrays(sample):
        named = {(m, n): array for m, of in sample.fields.items() for n, array in of.items()}
        for pair, gather in sample.gathers.items():
            named |= {(pair, "index"): gather.index, (pair, "weight"): gather.weight}
        return {k: None if v is None else (v.dtype, v.tolist()) for k, v in named.items()}

    return a.load == b.load and arrays(a) == arrays(b)


def gone(pid):
    """Whether a process has ended, or soon does."""
    for _ in range(600):
        if not runs(pid):
            return True
        time.sleep(0.1)
    return False


def test_what_hurts_is_a_bad_sample_and_the_rest_is_decoded(tmp_path, caplog):
    harm = {"1": "die", "3": f"eat:{4 * MEMORY}", "5": "bad", "6": "lie", "7": "warn",
            "8": f"die once:{tmp_path}/died", "9": f"keep:{MEMORY // 2}",
            "10": f"eat:{MEMORY // 2}", "11": "modules"}  # fmt: skip
    source = Hostile(13, harm)
    with caplog.at_level(logging.WARNING, "dflop_jax.data"), opened(source, 2) as decoder:
        begun = [decoder.submit(i) for i in range(13)]
        decoded = [f.result() for f in begun]
    reasons = {i: d.reason for i, d in enumerate(decoded) if isinstance(d, BadSample)}
    assert reasons.keys() == {1, 3, 5, 6}
    assert "number 1: its decoding process died (signal 11)" in reasons[1]
    assert reasons[3] == "number 3 eats memory"
    assert reasons[5] == "number 5 is bad"
    assert "but its header gives" in reasons[6]
    assert (tmp_path / "died").exists()
    good = set(range(13)) - reasons.keys() - {11}
    assert all(same(decoded[i], source.sample(i)) for i in good - {8, 9, 10})
    assert decoded[11].fields["a"]["x"][0, 0] != os.getpid()
    assert [r.getMessage() for r in caplog.records][:1] == ["number 7 is odd"]
    with pytest.raises(RuntimeError, match="closed"):
        decoder._pool_of_processes._process(new=True)


@pytest.mark.slow
def test_a_hang_ends_at_its_deadline():
    with opened(Hostile(3, {"1": "hang"}), timeout_s=10) as decoder:
        assert decoder.submit(0).result().load
        (process,) = decoder._pool_of_processes._idle
        assert decoder.submit(1).result() == BadSample(
            "number 1: not decoded within data.sample_timeout_s=10"
        )
        assert decoder.submit(2).result().load
        assert gone(process.pid)


def test_closing_ends_a_hanging_process():
    decoder = ProcessDecoder(Hostile(3, {"1": "hang"}), 1, LONG_S, MEMORY)
    assert decoder.submit(0).result().load
    (process,) = decoder._pool_of_processes._idle
    hanging = decoder.submit(1)
    time.sleep(0.5)
    decoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        hanging.result()
    assert gone(process.pid)


def test_the_forking_process_may_die():
    with opened(Hostile(3, {})) as decoder:
        assert decoder.submit(0).result().load
        workers = decoder._pool_of_processes
        workers._idle += [workers._process(new=True) for _ in range(2)]
        workers._server.send_signal(signal.SIGKILL)
        workers._server.wait()
        assert all(gone(process.pid) for process in workers._idle)
        assert all(decoder.submit(i).result().load for i in range(3))


def test_errors_of_the_program_reach_the_consumer():
    with opened(Hostile(2, {"1": "bug"})) as decoder:
        with pytest.raises(RuntimeError, match=r"number 1: (?s:.*)ZeroDivisionError: a bug"):
            decoder.submit(1).result()
        assert decoder.submit(0).result().load
    nowhere = Hostile(2, {})
    nowhere.factory = SourceFactory("tests.data.hostile_source:none", {})
    with opened(nowhere) as decoder, pytest.raises(RuntimeError, match="cannot open the data"):
        decoder.submit(0).result()


# ---- rows of an index ----


def here(reader):
    return index_build.LocalRowReader(
        {"a": reader}, lambda turns, _: encode_chatml(turns, ByteTokenizer())
    )


def hostile(path, harm):
    opens = "tests.data.hostile_source:open_hostile_rows"
    factory = SourceFactory(opens, {"path": str(path), "harm": harm})
    return partial(index_build.ProcessRowReader, factory, 6.0, MEMORY)


def listed(table):
    """All that a table says, record by record."""
    return [(facts, table.headers(i)) for i, facts in enumerate(table.records.tolist())]


def test_the_same_index_as_made_here(tmp_path, monkeypatch):
    path = made_dataset(tmp_path / "d", 30)
    records = json.loads(path.read_text())
    records[3]["conversations"] = []
    records[7].pop("image")
    path.write_text(json.dumps(records))
    make_shards(path, tmp_path / "s", 7)
    with tarfile.open(tmp_path / "s" / "t.tar", "w") as tar:
        add_bytes(tar, "no \udcff unicode.json", json.dumps(records[0]).encode())
        add_bytes(tar, "neither \udcff.json", b"[]")
    config = DataConfig(path=str(tmp_path / "s"), max_tokens=4096, max_bad_fraction=0.2)
    end, ended = DecoderPool._end, []
    monkeypatch.setattr(DecoderPool, "_end", lambda *a: ended.append(1) or end(*a))
    indexes = []
    for apart in (False, True):
        folder = tmp_path / str(apart)
        spec = media_spec(32, 4, sound=MelSpec())
        source = make_source(config, spec, index_dir=folder, vocab_size=512, in_processes=apart)
        (file,) = folder.iterdir()
        indexes.append((source.counts, file.name, file.read_bytes()))
    assert indexes[0][0]["unusable"] == 3
    assert indexes[0] == indexes[1]
    assert not ended  # none retires for what a library reserves


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
    plain = index_build.update_index(
        index_build.IndexRules(tmp_path / "i", "", lambda: here(reader)), {"a": reader}
    )["a"]
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        made = index_build.update_index(
            index_build.IndexRules(tmp_path / "j", "", hostile(path, harm)), {"a": reader}
        )["a"]
    assert (tmp_path / "died").exists()
    assert (plain.listed, made.listed, len(plain.table)) == (80, 80, 80)
    hurt = [2, 5, 9, 70, 71]
    assert listed(made.table) == [r for k, r in enumerate(listed(plain.table)) if k not in hurt]
    (file,) = tmp_path.glob("j*.unusable.txt")
    reasons = file.read_text().splitlines()
    assert [reason.split("]")[0] for reason in reasons] == [f"dataset.json[{k}" for k in hurt]
    assert made.bad == tuple(reasons[:3])
    why = dict(zip(hurt, reasons, strict=True))
    assert "its decoding process died (signal 11)" in why[2]
    assert "not decoded within data.sample_timeout_s=6" in why[5]
    assert "number 9 eats memory" in why[9]
    said = [r.getMessage() for r in caplog.records]
    assert said.count("odd") == 1
    assert sum(s.startswith("left out ") for s in said) < len(reasons)
