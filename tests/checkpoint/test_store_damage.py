"""Checkpoints that are damaged, killed while saved, or removed while read."""

import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dflop_jax.checkpoint import reader as store_reader
from dflop_jax.checkpoint import store as store_writer
from dflop_jax.checkpoint.store import (
    CheckpointReader,
    CheckpointStore,
    CorruptCheckpoint,
    StorageError,
)
from tests.checkpoint.store_cases import Case, assert_holds, random_case, save, save_forever, vector


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def read_all(store: CheckpointStore, step: int) -> None:
    reader = store.open(step)
    for name, spec in reader.specs.items():
        reader.read(name, (0,) * len(spec.shape), spec.shape)


def files_of(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


# Damage.


@pytest.mark.parametrize("block_bytes", [None, 64])
def test_every_flipped_bit_is_noticed(store, monkeypatch, block_bytes):
    if block_bytes:
        monkeypatch.setattr(store_writer, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(store_reader, "BLOCK_BYTES", block_bytes)
    case, rng = random_case(1, n_processes=2), np.random.default_rng(0)
    files = files_of(save(store, 1, case, {"step": 1}))
    assert len(files) >= 4
    flips = [(files[rng.integers(len(files))], None) for _ in range(100)]
    marker = store.folder(1) / "COMMITTED"
    if block_bytes is None:
        flips = [(marker, n) for n in range(8 * marker.stat().st_size)]
    for file, bit in flips:
        sound = file.read_bytes()
        bit = int(rng.integers(8 * len(sound))) if bit is None else bit
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint) as e:
            read_all(store, 1)
        assert file.name in str(e.value)
        assert "\n" not in str(e.value)
        file.write_bytes(sound)
    assert_holds(store.open(1), case)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.unlink(),
        lambda f: f.write_bytes(b""),
        lambda f: f.write_bytes(f.read_bytes()[:-1]),
        lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
        lambda f: f.write_bytes(f.read_bytes() + b"\0"),
        lambda f: f.write_bytes(bytes(f.stat().st_size)),
        lambda f: (f.unlink(), f.mkdir()),
    ],
    ids=["missing", "empty", "one byte less", "half", "one byte more", "zeros", "folder"],
)
@pytest.mark.parametrize("which", range(4))
def test_lost_bytes_are_noticed(store, change, which):
    files = files_of(save(store, 1, random_case(1, n_processes=2)))
    change(files[which])
    with pytest.raises(CorruptCheckpoint, match="0000001") as e:
        read_all(store, 1)
    # Without its marker it is only said to be removed.
    assert files[which].name in str(e.value)


def test_a_sound_file_of_another_checkpoint_is_noticed(store):
    """An interrupted copy of one checkpoint over another of the same shapes."""
    folders = [save(store, step, vector(first=step)) for step in (1, 2)]
    name = "process-00000"
    assert (folders[0] / name).stat().st_size == (folders[1] / name).stat().st_size
    shutil.copy(folders[1] / name, folders[0] / name)
    with pytest.raises(CorruptCheckpoint, match="process-00000: damaged"):
        read_all(store, 1)
    assert_holds(store.open(2), vector(first=2))


def test_without_marker_there_is_no_checkpoint(store):
    folder = save(store, 1, vector())
    (folder / "COMMITTED").rename(folder / "COMMITTED.tmp")
    assert store.steps() == ()
    with pytest.raises(CorruptCheckpoint, match="COMMITTED: missing"):
        store.open(1)


# Set aside.


def test_what_is_set_aside_stays_until_a_newer_checkpoint_is_committed(store):
    for step in (1, 2, 3):
        save(store, step, vector(first=step))
    held = {file.name: file.read_bytes() for file in files_of(store.folder(3))}
    folder = store.set_aside(3, "damaged")
    assert folder.name == "00000003.damaged"
    assert {file.name: file.read_bytes() for file in files_of(folder)} == held
    assert store.steps() == (2,)
    # Neither a save that fails nor an older one that is committed takes it.
    store.prepare(3)
    store.discard(3)
    store.discard(2)
    save(store, 2, vector())
    assert folder.exists()
    save(store, 3, vector())
    assert sorted(os.listdir(store.root)) == ["00000002", "00000003"]


def test_what_is_set_aside_comes_back_by_its_name(store):
    for step in (1, 120):
        save(store, step, vector(first=step))
    store.set_aside(120, "other-version").rename(store.folder(120))  # as `mv` does
    assert store.steps() == (120, 1)
    assert_holds(store.open(120), vector(first=120))


def test_nothing_is_set_aside_over_another(store):
    save(store, 1, vector())
    for name in ("00000001.other-version", "00000001.copy", "mine.damaged"):
        (store.root / name).mkdir()
    assert store.set_aside(1, "other-version").name == "00000001.other-version.2"
    save(store, 5, vector())
    # What somebody else named stays.
    assert sorted(os.listdir(store.root)) == ["00000001.copy", "00000005", "mine.damaged"]


def test_setting_aside_what_is_not_there_is_said(store):
    with pytest.raises(StorageError, match=r"cannot set checkpoint 1 aside in .*: No such file"):
        store.set_aside(1, "damaged")


# Readers beside a save.


def test_removed_while_read(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1, vector())
    reader = store.open(1)
    save(store, 2, vector())
    with pytest.raises(CorruptCheckpoint, match="00000001: removed while it was read"):
        reader.read("a", (0,), (8,))


def test_readers_beside_saves_see_whole_checkpoints_or_say_so(tmp_path):
    store, done, sound = CheckpointStore(tmp_path, keep=1), threading.Event(), 0
    cases = {step: random_case(step, n_processes=2) for step in range(1, 26)}
    save(store, 1, cases[1])

    def save_the_others() -> None:
        for step in range(2, 26):
            save(store, step, cases[step])
        done.set()

    saver = threading.Thread(target=save_the_others)
    saver.start()
    while not done.is_set() or not sound:
        for step in store.steps():
            try:
                assert_holds(store.open(step), cases[step])
                sound += 1
            except CorruptCheckpoint:
                pass
        assert saver.is_alive() or done.is_set()
    saver.join()
    assert store.steps() == (25,)


# Killed while saving.


def assert_all_hold(store: CheckpointStore) -> None:
    for step in store.steps():
        reader: CheckpointReader = store.open(step)
        assert reader.run_state == {"step": step}
        assert_holds(reader, random_case(step, n_processes=2))


def test_killed_at_random_moments(store):
    """10 processes, each killed while it saves; what is listed is whole, and the next goes on."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["tests.checkpoint.store_cases"])
    rng, newest = np.random.default_rng(), 0
    for _ in range(10):
        receive, ready = fork.Pipe(duplex=False)
        process = fork.Process(target=save_forever, args=(store.root, ready))
        process.start()
        ready.close()
        assert receive.poll(60)
        first = receive.recv()
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.join()
        receive.close()
        steps = store.steps()
        assert first > newest
        assert steps[0] >= first
        assert len(steps) in (1, 2, 3)
        assert_all_hold(store)
        newest = steps[0]


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


CHANGES = ["mkdir", "unlink", "rmdir", "fsync", "replace"]


def stop_before(monkeypatch, n: int, error: BaseException) -> list[int]:
    """Raise before the n-th call that changes the disk."""
    calls = [0]

    def guard(original):
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] == n:
                raise error
            return original(*args, **kwargs)

        return call

    for name in CHANGES:
        monkeypatch.setattr(os, name, guard(getattr(os, name)))
    return calls


def write_and_commit(store: CheckpointStore, step: int, case: Case) -> None:
    try:
        parts = [store.write(step, case.specs, own, n) for n, own in enumerate(case.boxes)]
    except StorageError:
        store.discard(step)  # as process 0 does when any process fails
        raise
    store.commit(step, case.specs, parts, {"step": step})


def save_plainly(store: CheckpointStore, step: int, case: Case) -> None:
    store.prepare(step)
    write_and_commit(store, step, case)


def in_progress(store: CheckpointStore) -> Case:
    """Two checkpoints, a leftover that a third will replace, and an older leftover."""
    for step in (1, 2):
        save_plainly(store, step, random_case(step, n_processes=2))
    case = random_case(3, n_processes=2)
    for step in (0, 3):
        store.prepare(step)
        store.write(step, case.specs, case.boxes[1], 1)
    return case


@pytest.mark.parametrize("kind", ["kill", "disk full"])
def test_stopped_before_every_change_to_the_disk(tmp_path, monkeypatch, kind):
    n, calls = 0, [0]
    while calls[0] >= n:
        n += 1
        store = CheckpointStore(tmp_path / str(n), keep=2)
        case = in_progress(store)
        error = Killed() if kind == "kill" else OSError(28, "No space left on device")
        with monkeypatch.context() as m:
            calls = stop_before(m, n, error)
            failed, prepared = "", False
            try:
                store.prepare(3)
                prepared = True
                write_and_commit(store, 3, case)
            except Killed:
                failed = "killed"
            except StorageError as e:
                failed = str(e)
                assert failed.endswith(f"in {store.root}: No space left on device")
        assert bool(failed) == (calls[0] >= n)
        assert 2 in store.steps()
        if "cannot save" in failed:
            assert store.steps() == (2, 1)
            assert not (prepared and store.folder(3).exists())
        assert_all_hold(store)
        after = random_case(4, n_processes=2)
        save_plainly(store, 4, after)
        assert store.steps()[0] == 4
        assert sorted(os.listdir(store.root)) == sorted(f"{s:08d}" for s in store.steps())
        assert_all_hold(store)
    assert n > 12


def test_all_is_on_disk_before_the_marker(store, monkeypatch):
    """A power failure must not leave a marker whose checkpoint is lost."""
    synced: list[str] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        original(fd)

    before: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (before.extend(synced), replace(a, b)))
    save(store, 1, vector())
    assert before == ["checkpoints", "process-00000", "manifest.json", "COMMITTED.tmp", "00000001"]
    assert synced[5:] == ["00000001"]
