"""What checkpoint storage says to mistakes of its caller and to trouble with the file system."""

import errno
import multiprocessing
import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dflop_jax.checkpoint.store import ArrayBox, CheckpointStore, StorageError
from tests.checkpoint.store_cases import (
    Case,
    assert_holds,
    random_case,
    save,
    save_with_small_files_allowed,
    vector,
)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


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
            "array a: of its 8 elements no process wrote 4, and several wrote 0",
        ),
        (lambda s, p: (s, []), "no process wrote 8"),
        (lambda s, p: (s, [*p, replace(p[0], process=2)]), "several wrote 4"),
        (lambda s, p: ({"a": replace(s["a"], shape=(9,))}, p), "no process wrote 1"),
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


@contextmanager
def modes(root: Path, folders: int, files: int):
    """Everything below `root` has these modes, and can be removed afterwards."""
    paths = [root, *root.rglob("*")]
    for path in paths[::-1]:
        path.chmod(folders if path.is_dir() else files)
    try:
        yield
    finally:
        for path in paths:
            path.chmod(0o755)


def test_without_permission():
    with tempfile.TemporaryDirectory() as folder:
        store, case = CheckpointStore(Path(folder)), vector()
        save(store, 1, case)
        store.prepare(2)
        with modes(store.root, 0o555, 0o444), unprivileged():
            assert_holds(store.open(1), case)
            for attempt in (
                lambda: store.prepare(3),
                lambda: store.write(2, case.specs, case.boxes[0], 0),
                lambda: store.discard(1),
            ):
                with pytest.raises(StorageError) as e:
                    attempt()
                one_line(e, folder, "Permission denied")
        with modes(store.root, 0o555, 0o000), unprivileged():
            with pytest.raises(StorageError) as e:
                store.open(1)
            one_line(e, folder, "Permission denied")
        data = store.folder(1) / "process-00000"
        with modes(data, 0o555, 0o000), unprivileged():
            with pytest.raises(StorageError) as e:
                store.open(1).read("a", (0,), (8,))
            one_line(e, store.folder(1), "Permission denied")
        assert_holds(store.open(1), case)


def test_no_room_for_the_manifest(store):
    """/dev/full is a full disk."""
    save(store, 1, vector())
    store.prepare(2)
    case = vector()
    part = store.write(2, case.specs, case.boxes[0], 0)
    (store.folder(2) / "manifest.json").symlink_to("/dev/full")
    with pytest.raises(StorageError) as e:
        store.commit(2, case.specs, [part], {})
    one_line(e, "save checkpoint 2", store.root, "No space left on device")
    assert e.value.errno == errno.ENOSPC
    assert os.listdir(store.root) == ["00000001"]
    assert_holds(store.open(1), case)


def test_no_room_for_the_arrays(store):
    """A process that may write no larger file fails as on a full disk, in the middle of one."""
    save(store, 1, vector())
    spawn = multiprocessing.get_context("spawn")
    receive, answer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=save_with_small_files_allowed, args=(store.root, 500, answer))
    process.start()
    assert receive.poll(60)
    kind, number, message = receive.recv()
    process.join()
    assert (kind, number) == ("StorageError", errno.EFBIG)
    assert message == f"cannot save checkpoint 2 in {store.root}: File too large"
    assert os.listdir(store.root) == ["00000001"]
    assert_holds(store.open(1), vector())


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
