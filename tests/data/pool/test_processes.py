"""Samples that hang, kill or fill their decoder are named, and nothing else notices."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import BadSample, Loader, make_source
from dflop_jax.data.decoder import ThreadDecoder, decode
from dflop_jax.data.pool.processes import ProcessDecoder, make_decoder
from dflop_jax.data.sample import SourceFactory
from tests.data.media_cases import made_dataset
from tests.data.pool.hostile_source import Hostile
from tests.data.views import media_spec
from tests.processes import runs

LONG_S = 300.0  # longer than anything takes on a busy machine
MEMORY = 256 << 20


def opened(source, workers=1, timeout_s=LONG_S, memory_bytes=MEMORY):
    return closing(ProcessDecoder(source, workers, timeout_s, memory_bytes))


def same(a, b):
    """Whether two samples hold the same bytes under the same names."""
    assert a.load == b.load
    assert {m: set(f) for m, f in a.fields.items()} == {m: set(f) for m, f in b.fields.items()}
    assert a.gathers.keys() == b.gathers.keys()
    pairs = [(a.fields[m][n], b.fields[m][n]) for m in a.fields for n in a.fields[m]]
    for pair in a.gathers:
        pairs.append((a.gathers[pair].index, b.gathers[pair].index))
        assert (a.gathers[pair].weight is None) == (b.gathers[pair].weight is None)
        if a.gathers[pair].weight is not None:
            pairs.append((a.gathers[pair].weight, b.gathers[pair].weight))
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


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
    assert "number 1: decoding it ended the process (signal 11)" in reasons[1]
    assert reasons[3] == "number 3 eats memory"
    assert reasons[5] == "number 5 is bad"
    assert "its header promised" in reasons[6]
    assert (tmp_path / "died").exists()
    good = set(range(13)) - reasons.keys() - {11}
    assert all(same(decoded[i], source.sample(i)) for i in good - {8, 9, 10})
    assert decoded[11].fields["a"]["x"][0, 0] != os.getpid()
    assert [r.getMessage() for r in caplog.records][:1] == ["number 7 is odd"]
    with pytest.raises(RuntimeError, match="closed"):
        decoder._pool_of_processes._start()


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
        workers._idle += [workers._start() for _ in range(2)]
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
    nowhere.factory = SourceFactory("tests.data.pool.hostile_source:none", {})
    with opened(nowhere) as decoder, pytest.raises(RuntimeError, match="cannot open the data"):
        decoder.submit(0).result()


def test_batches_equal_those_of_a_run_that_knew(caplog):
    harm = {"2": "die", "7": "bad", "11": "lie"}
    processes = partial(make_decoder, timeout_s=LONG_S, memory_bytes=MEMORY)

    def numbers(source, decoder, first=0):
        loader = Loader(source, global_batch=5, decoder=decoder, max_bad_fraction=1)
        with closing(
            loader.batches(range(first, 9), lambda _, s: [x.fields["a"]["x"] for x in s.values()])
        ) as batches:
            return [np.stack(b).tolist() for b in batches], len(loader.replaced)

    known = numbers(Hostile(20, dict.fromkeys(harm, "bad")), ThreadDecoder)
    assert numbers(Hostile(20, harm), processes) == known
    assert numbers(Hostile(20, harm), processes, 4)[0] == known[0][4:]


def test_a_dataset_of_every_kind_decodes_to_the_same_bytes(tmp_path):
    file = made_dataset(tmp_path / "d")
    config = DataConfig(path=str(file), max_tokens=4096)
    source = make_source(config, media_spec(32, 4), index_dir=tmp_path, vocab_size=512)
    decoder = make_decoder(source, 2, LONG_S, 1 << 30)
    assert isinstance(decoder, ProcessDecoder)
    with closing(decoder):
        for index, decoded in [(i, decoder.submit(i)) for i in range(len(source))]:
            sample = decoded.result()
            assert same(sample, decode(source, index))
            assert not any(a.flags.writeable for f in sample.fields.values() for a in f.values()
                           if a.size)  # fmt: skip
    assert isinstance(make_decoder(make_source(DataConfig(), media_spec(32, 4)), 1, 1, 1),
                      ThreadDecoder)  # fmt: skip
