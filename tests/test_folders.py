"""What cannot be written is said in one way, whatever it is; logs on a full disk end no process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax.distributed.process_exit import BAD_INPUT, TRANSIENT_FAILURE, exit_code_of
from dflop_jax.folders import make_folder, writable_path
from dflop_jax.report.run_folder import RunFolder, answer_folder

FULL = Path("/dev/full")
REMEDY = "choose another"


def write(path):
    with writable_path(path, REMEDY) as file:
        file.write_text("words")
        return file


def run_folder(path):
    RunFolder(path).close()
    return path


def asked(path):
    return answer_folder(path, "plan")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("make", [lambda p: make_folder(p, REMEDY), write, run_folder, asked])
@pytest.mark.parametrize("name", ["file/below", "file/far/below"])
def test_a_file_in_a_folders_place_is_named(make, name):
    Path("file").write_text("mine")
    with pytest.raises(ValueError, match=r"^file: is a file; choose another") as refused:
        make(name)
    assert exit_code_of(refused.value) == BAD_INPUT
    assert Path("file").read_text() == "mine"


def test_what_is_not_allowed(monkeypatch):
    Path("folder").mkdir()
    with pytest.raises(ValueError, match=r"^folder: cannot be written \(Is a directory\); choose"):
        write("folder")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for make in (lambda p: make_folder(p, REMEDY), run_folder, asked):
        with pytest.raises(ValueError, match=r"^folder: cannot be written \(Permission denied\)"):
            make("folder")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_full_disk_may_have_room_later():
    Path("full").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device: 'full'") as refused:
        write("full")
    assert refused.value.errno == errno.ENOSPC
    assert exit_code_of(refused.value) == TRANSIENT_FAILURE


# ---- logs on a full disk ----


PROGRAM = """
import os, sys
from dflop_jax.folders import tolerate_lost_log_lines

if {drops}:
    tolerate_lost_log_lines()
for stream in (sys.stdout, sys.stderr):
    print("a line", file=stream)
    stream.flush()
os._exit(0)
"""


def end_of(drops, **streams):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(drops=drops)], check=False, text=True, **streams
    )


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_log_without_room_loses_lines_and_ends_nothing(stream):
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    with FULL.open("w") as full:
        done = end_of(True, **{stream: full, other: subprocess.PIPE})
        assert (done.returncode, getattr(done, other)) == (0, "a line\n")
        assert end_of(False, **{stream: full, other: subprocess.DEVNULL}).returncode != 0
