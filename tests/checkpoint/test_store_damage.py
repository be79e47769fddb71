"""Checkpoints that are damaged, killed while saved, or removed while read; mistakes of the caller,
and trouble with the file system."""

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dflop_jax.checkpoint import format
from dflop_jax.checkpoint.format import ArrayBox, CorruptCheckpoint, StorageError
from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore
from tests.checkpoint.store_cases import Case, assert_holds, random_case, save, vector


def read_all(store: CheckpointStore, step: int) -> None:
    reader = store.open(step)
    for name, spec in reader.specs.items():
        reader.read(name, (0,) * len(spec.shape), spec.shape)


def files_of(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


# Damage.


def flip(at):
    """A change of one bit of a file, at a share of its length."""

    def change(file):
        data = bytearray(file.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        file.write_bytes(data)

    return change


DAMAGES = {
    "missing": lambda f: f.unlink(),
    "empty": lambda f: f.write_bytes(b""),
    "one byte less": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "half": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "one byte more": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "folder": lambda f: (f.unlink(), f.mkdir()),
    "of another checkpoint": lambda f: shutil.copy(f.parents[1] / "00000002" / f.name, f),
    **{f"a bit at {at}": flip(at) for at in (0.0, 0.3, 0.5, 0.7, 1.0)},
}


@pytest.mark.parametrize("block_bytes", [format.BLOCK_BYTES, 64])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", range(4))
def test_damage_is_noticed(store, monkeypatch, damage, which, block_bytes):
    monkeypatch.setattr(format, "BLOCK_BYTES", block_bytes)
    files = files_of(save(store, 1, random_case(1, n_processes=2)))
    save(store, 2, random_case(1, n_processes=2), {"step": 2})
    assert len(files) == 4
    same = files[which].read_bytes() == (store.folder(2) / files[which].name).read_bytes()
    if same and damage == "of another checkpoint":
        return
    DAMAGES[damage](files[which])
    with pytest.raises(CorruptCheckpoint, match="0000001") as e:
        read_all(store, 1)
    # Without its marker it is only said to be removed.
    assert files[which].name in str(e.value)
    assert "\n" not in str(e.value)
    assert (1 in store.steps()) == ((store.folder(1) / "COMMITTED").exists())


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


# Readers beside a save.


def test_removed_while_read(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1, vector())
    reader = store.open(1)
    save(store, 2, vector())
    with pytest.raises(CorruptCheckpoint, match="00000001: removed while it was read"):
        reader.read("a", (0,), (8,))


# Killed while saving.


def assert_all_hold(store: CheckpointStore) -> None:
    for step in store.steps():
        reader: CheckpointReader = store.open(step)
        assert reader.run_state == {"step": step}
        assert_holds(reader, random_case(step, n_processes=2))


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


# Mistakes of the caller.


def commit_parts(store, case: Case, change) -> None:
    store.prepare(1)
    parts = [store.write(1, case.specs, own, n) for n, own in enumerate(case.boxes)]
    specs, parts = change(case.specs, parts)
    store.commit(1, specs, parts, {})


@pytest.mark.parametrize(
    "change, why",
    [
        (
            lambda s, p: (s, p[:1]),
            "array a: of its 8 elements, 4 were not written, and 0 were written several times",
        ),
        (lambda s, p: (s, []), "8 were not written"),
        (lambda s, p: (s, [*p, replace(p[0], process=2)]), "4 were written several times"),
        (lambda s, p: ({"a": replace(s["a"], shape=(9,))}, p), "1 were not written"),
    ],
)
def test_what_is_not_whole_is_not_committed(store, change, why):
    a = vector().arrays["a"]
    case = replace(vector(), boxes=[[ArrayBox("a", (0,), a[:4])], [ArrayBox("a", (4,), a[4:])]])
    with pytest.raises(ValueError, match=why):
        commit_parts(store, case, change)
    assert store.steps() == ()


# Trouble with the file system: one line, the last checkpoint untouched, nothing in the way.


@contextmanager
def unprivileged():
    """Root may write anywhere, so be nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def one_line(error: pytest.ExceptionInfo, *words: object) -> None:
    assert "\n" not in str(error.value)
    assert all(str(w) in str(error.value) for w in words), str(error.value)


def test_root_is_a_file(tmp_path):
    (tmp_path / "f").write_text("x")
    store = CheckpointStore(tmp_path / "f")
    case = vector()
    for attempt in (
        store.steps,
        lambda: store.prepare(1),
        lambda: store.write(1, case.specs, case.boxes[0], 0),
    ):
        with pytest.raises(StorageError) as e:
            attempt()
        one_line(e, tmp_path / "f", "Not a directory")
        assert e.value.errno == errno.ENOTDIR
    assert (tmp_path / "f").read_text() == "x"


def test_without_permission():
    with tempfile.TemporaryDirectory() as folder:
        store, case = CheckpointStore(Path(folder)), vector()
        save(store, 1, case)
        store.prepare(2)
        paths = [store.root, *store.root.rglob("*")]
        for mode in (0o444, 0o000):  # of files
            for path in paths[::-1]:
                path.chmod(0o555 if path.is_dir() else mode)
            with unprivileged():
                attempts = [
                    lambda: store.prepare(3),
                    lambda: store.write(2, case.specs, case.boxes[0], 0),
                    lambda: store.discard(1),
                ]
                for attempt in attempts if mode else [lambda: store.open(1)]:
                    with pytest.raises(StorageError) as e:
                        attempt()
                    one_line(e, folder, "Permission denied")
                if mode:
                    assert_holds(store.open(1), case)
            for path in paths:
                path.chmod(0o755)


@pytest.mark.parametrize("name", ["process-00000", "manifest.json", "COMMITTED.tmp"])
def test_no_room(store, name):
    """/dev/full is a full disk."""
    case = vector()
    save(store, 1, case)
    store.prepare(2)
    (store.folder(2) / name).symlink_to("/dev/full")
    with pytest.raises(StorageError) as e:
        store.commit(2, case.specs, [store.write(2, case.specs, case.boxes[0], 0)], {})
    one_line(e, "save checkpoint 2", store.root, "No space left on device")
    assert e.value.errno == errno.ENOSPC
    store.discard(2)  # as process 0 does when any process fails
    assert os.listdir(store.root) == ["00000001"]
    assert_holds(store.open(1), case)


def test_a_folder_that_is_not_shared(store):
    """Process 0 does not see what another host wrote to its own disk."""
    case = random_case(1, n_processes=1)
    store.prepare(1)
    part = store.write(1, case.specs, case.boxes[0], 0)
    (store.folder(1) / "process-00000").unlink()
    with pytest.raises(StorageError) as e:
        store.commit(1, case.specs, [part], {})
    one_line(e, "process-00000", "need one shared folder")
    assert store.steps() == ()


def test_a_checkpoint_that_is_saved_though_an_old_one_stays(store, monkeypatch):
    for step in (1, 2):
        save(store, step, vector())
    with monkeypatch.context() as m:
        m.setattr("shutil.rmtree", lambda folder: os.rmdir(folder))
        with pytest.raises(StorageError) as e:
            save(store, 3, vector())
    one_line(e, "cannot remove older checkpoints (3 is saved)", store.root, "Directory not empty")
    assert store.steps() == (3, 2)
    save(store, 4, vector())
    assert sorted(os.listdir(store.root)) == ["00000003", "00000004"]
