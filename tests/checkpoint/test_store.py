"""Checkpoint storage: what many processes write comes back in any slice, and errors are clear.

Mistakes and full disks are in test_store_errors.py, damage and kills in test_store_damage.py.
"""

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflop_jax.checkpoint import format
from dflop_jax.checkpoint.format import ArrayBox, CorruptCheckpoint
from dflop_jax.checkpoint.store import CheckpointStore
from tests.checkpoint.store_cases import (
    Case,
    alone,
    assert_holds,
    random_case,
    same,
    save,
    vector,
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Arrays cross blocks."""
    monkeypatch.setattr(format, "BLOCK_BYTES", 64)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def check_slices(store: CheckpointStore, seed: int, **sizes: Any) -> None:
    """Write a random sharding, read random boxes, compare with plain numpy."""
    case = random_case(seed, 1 + seed % 4, **sizes)
    save(store, seed, case, {"seed": seed})
    reader, rng = store.open(seed), np.random.default_rng(seed)
    assert reader.run_state == {"seed": seed}
    assert_holds(reader, case)
    for name, array in case.arrays.items():
        for _ in range(4):
            start = tuple(int(rng.integers(0, n + 1)) for n in array.shape)
            shape = tuple(int(rng.integers(0, n - s + 1)) for n, s in zip(array.shape, start))
            box = tuple(slice(s, s + n) for s, n in zip(start, shape))
            assert same(reader.read(name, start, shape), np.asarray(array[box]))


@pytest.mark.parametrize("seed", range(12))
def test_any_slice_of_what_any_processes_wrote(store, seed):
    check_slices(store, seed)


@pytest.mark.parametrize("seed", range(12, 24))
def test_any_slice_across_blocks(store, small_blocks, seed):
    check_slices(store, seed, n_arrays=12, most=40, ranks=(0, 1, 2))


def test_equal_state_makes_equal_files_in_any_order(tmp_path):
    case, folders = random_case(3), []
    for n, order in enumerate([1, -1]):
        pieces = [own[::order] for own in case.boxes]
        store = CheckpointStore(tmp_path / str(n))
        specs = dict([*case.specs.items()][::order])
        folders.append(save(store, 7, replace(case, specs=specs, boxes=pieces)))
    assert files_of(folders[0]) == files_of(folders[1])


def test_a_run_state_comes_back_exactly(store):
    run_state = {
        "generator": 2**127 + 1,
        "rate": 0.1 + 0.2,
        "worst": float("inf"),
        "name": "mél\n",
        "no": None,
    }
    save(store, 1, vector(), run_state)
    assert store.open(1).run_state == run_state


# Only what overlaps is read.


def test_files_of_other_processes_are_not_read(store):
    array = np.arange(8, dtype=np.int32)
    halves = [[ArrayBox("x", (0,), array[:4])], [ArrayBox("x", (4,), array[4:])]]
    folder = save(store, 1, replace(alone("x", array), boxes=halves))
    (folder / "process-00001").unlink()
    reader = store.open(1)
    assert same(reader.read("x", (1,), (3,)), array[1:4])
    with pytest.raises(CorruptCheckpoint, match="process-00001: missing"):
        reader.read("x", (3,), (2,))


def test_blocks_of_other_elements_are_not_read(store, small_blocks):
    array = np.arange(48, dtype=np.int32)
    folder = save(store, 1, alone("x", array))
    file = folder / "process-00000"
    data = bytearray(file.read_bytes())
    assert len(data) % 64 == 8  # elements 46 and 47 are the last block
    data[-1] ^= 1
    file.write_bytes(data)
    reader = store.open(1)
    assert same(reader.read("x", (2,), (44,)), array[2:46])
    with pytest.raises(CorruptCheckpoint, match="process-00000: damaged"):
        reader.read("x", (45,), (2,))


def test_what_writing_and_reading_hold_beside_an_array(store):
    """The block that is checked; files are mapped."""
    array = np.zeros((4 << 20,), np.float32)  # 16 MiB
    case = alone("x", array)
    store.prepare(1)
    tracemalloc.start()
    try:
        store.commit(1, case.specs, [store.write(1, case.specs, case.boxes[0], 0)], {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        found = store.open(1).read("x", (0,), array.shape)
        assert found.nbytes <= tracemalloc.get_traced_memory()[1] < found.nbytes + (3 << 20)
    finally:
        tracemalloc.stop()


# Which checkpoints there are.


def test_the_newest_are_kept_and_older_leftovers_removed(store):
    save(store, 10, vector())
    for left in (5, 15, 50):
        store.prepare(left)
    (store.root / "notes.txt").write_text("mine")
    save(store, 20, vector())
    assert store.steps() == (20, 10)
    save(store, 30, vector())
    assert store.steps() == (30, 20)
    assert sorted(os.listdir(store.root)) == ["00000020", "00000030", "00000050", "notes.txt"]


def test_the_first_of_every_so_many_steps_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_every=100)
    stay = {10: (10,), 99: (99,), 110: (110,), 150: (150, 110), 200: (200, 110),
            250: (250, 200, 110), 410: (410, 200, 110)}  # fmt: skip
    for step, steps in stay.items():
        save(store, step, vector())
        assert store.steps() == steps


def test_the_best_stays_until_another_is(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        save(store, step, vector())
    store.best = 2
    for step in (3, 4):
        save(store, step, vector())
    assert store.steps() == (4, 2)
    store.best = 4
    save(store, 5, vector())
    assert store.steps() == (5, 4)


def test_a_checkpoint_is_not_overwritten(store):
    folder = save(store, 1, vector())
    before = files_of(folder)
    case = vector(5)
    with pytest.raises(ValueError, match="00000001: this checkpoint exists; discard it or"):
        store.prepare(1)
    assert files_of(folder) == before
    store.discard(1)
    store.discard(1)
    assert store.steps() == ()
    save(store, 1, case)
    assert_holds(store.open(1), case)


def test_a_renamed_checkpoint_is_refused(store):
    save(store, 1, vector()).rename(store.folder(2))
    with pytest.raises(CorruptCheckpoint, match="00000002: contains step 1"):
        store.open(2)


@pytest.mark.parametrize(
    "name, step", [("a b", 0), ("50%20#?", 99_999_999), ("Läufe{x}$HOME*", 123_456_789_012)]
)
def test_folders_and_steps_of_any_name_and_size(tmp_path, name, step):
    store = CheckpointStore(tmp_path / name)
    assert store.steps() == ()
    for case in (vector(), Case({}, {}, [[]])):
        store.discard(step)
        save(store, step, case, {"only": "meta"})
        assert_holds(store.open(step), case)
    assert store.steps() == (step,)
    assert sorted(files_of(store.folder(step))) == ["COMMITTED", "manifest.json"]
