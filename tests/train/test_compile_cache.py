"""Compiled programs on disk: where they are kept, and what comes of a damaged one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dflop_jax.train import compile_cache
from dflop_jax.train.compile_cache import SUFFIX, CheckedFiles

from ..processes import ROOT

FOLDER, MOST = "jax_compilation_cache_dir", "jax_compilation_cache_max_size"


@pytest.mark.parametrize("told, most", [(None, -1), ("/told/to/jax", -1), (None, 1000)])
def test_programs_are_kept_where_jax_was_told_to_or_with_the_run(tmp_path, monkeypatch, told, most):
    monkeypatch.setattr(compile_cache, "_TOLD_CACHE", told)
    for place, name in ((compile_cache.compiler, "_cache_write"),
                        (compile_cache.compilation_cache, "get_file_cache")):  # fmt: skip
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(compile_cache.compilation_cache, "get_file_cache", None)
    before = jax.config.values[FOLDER], jax.config.values[MOST]
    jax.config.update(MOST, most)
    try:
        compile_cache.use_cache(tmp_path)
        assert jax.config.values[FOLDER] == (told or str(tmp_path / "xla"))
        ours = compile_cache.compilation_cache.get_file_cache
        assert (ours is None) == (most > 0)  # jax bounds the size of what it keeps itself only
    finally:
        jax.config.update(FOLDER, before[0])
        jax.config.update(MOST, before[1])


@pytest.mark.parametrize("most_bytes", [0, 40, 41, 80, 200, 300, 1e9])
def test_the_entries_that_were_used_last_stay(tmp_path, most_bytes):
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]  # the last is not there
    sizes = [0, 8, 100, 9, 50, 1]  # in the order in which they were made
    kept = [CheckedFiles(folder) for folder in folders[:2]]
    for i, size in enumerate(sizes):
        kept[i % 2].put(str(i), bytes(size))
        os.utime(folders[i % 2] / f"{i}{SUFFIX}", (i, i))
    (folders[0] / "of-another-kind").write_bytes(bytes(1000))
    assert kept[1].get("1") == bytes(8)  # used now
    last_used = [1, 5, 4, 3, 2, 0]
    sums = [sum(32 + sizes[i] for i in last_used[: n + 1]) for n in range(6)]
    stay = {i for i, n_bytes in zip(last_used, sums, strict=True) if n_bytes <= most_bytes}
    assert compile_cache.keep_used(folders, most_bytes) == 6 - len(stay)
    assert {i for i in range(6) if kept[i % 2].get(str(i)) is not None} == stay
    assert (folders[0] / "of-another-kind").exists()
    assert compile_cache.keep_used(folders[2:], most_bytes) == 0


@pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)) * 99])
def test_every_flipped_bit_is_found_and_the_entry_replaced(tmp_path, value, caplog):
    files = CheckedFiles(tmp_path / "new")
    assert files.get("a") is None
    files.put("a", value)
    assert files.get("a") == value
    (file,) = (tmp_path / "new").iterdir()
    whole = file.read_bytes()
    for place in sorted({0, 31, len(whole) // 2, len(whole) - 1}):
        for bit in (0, 7):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            file.write_bytes(data)
            assert files.get("a") is None
            assert not file.exists()
            files.put("a", value)
            assert files.get("a") == value
    for n in {0, 5, 32, len(whole) - 1} - {len(whole)}:
        file.write_bytes(whole[:n])
        assert files.get("a") is None
    assert "is damaged; it is compiled again" in caplog.text


def test_an_entry_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    files = CheckedFiles(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        files.put("a", b"x")
    assert not list(tmp_path.iterdir())


# A process of its own, as jax takes up a cache once. Prints how many programs it compiled.
PROGRAM = """
import jax, sys, warnings
warnings.simplefilter("error")
from dflop_jax.train.compile_cache import use_cache
use_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda e, **_: hits.append(e))
jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
print(sum(e.endswith("/cache_misses") for e in hits), sum(e.endswith("/cache_hits") for e in hits))
"""


def test_jax_compiles_a_damaged_program_again_once(tmp_path):
    def run() -> list[int]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return [int(n) for n in done.stdout.split()]

    misses, hits = run()
    assert misses > 0
    assert hits == 0
    assert run() == [0, misses]
    for file in (tmp_path / "xla").glob(f"*{SUFFIX}"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    assert run() == [misses, 0]
    assert run() == [0, misses]
