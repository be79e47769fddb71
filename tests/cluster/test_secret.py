"""Where a process finds the secret of its run."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflop_jax.cluster import secret
from dflop_jax.cluster.secret import SECRET_ENV, default_file, find_secret, new_secret
from dflop_jax.config import DistributedConfig

TEXT = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _own_home(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET_ENV, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    return path


def refusal(config: DistributedConfig) -> str:
    with pytest.raises(ValueError, match="secret") as e:
        find_secret(config)
    assert "\n" not in str(e.value)
    assert TEXT not in str(e.value)
    return str(e.value)


def test_a_file_comes_before_the_environment(monkeypatch, file):
    monkeypatch.setenv(SECRET_ENV, "another secret that is long enough")
    assert find_secret(DistributedConfig()) == b"another secret that is long enough"
    assert find_secret(DistributedConfig(secret_file=str(file))) == TEXT.encode()


def test_a_user_has_one_secret_that_nobody_else_can_read():
    first = find_secret(DistributedConfig())
    assert len(first) == 64
    assert find_secret(DistributedConfig()) == first
    assert default_file().stat().st_mode & 0o777 == 0o600
    assert default_file().parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in default_file().parent.iterdir()] == ["secret"]  # no drafts


def test_processes_that_make_it_at_once_have_the_same():
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(find_secret, [DistributedConfig()] * 32))
    assert len(found) == 1


def test_secrets_differ():
    assert len({new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o644])
def test_a_file_that_others_can_open(file, mode):
    file.chmod(mode)
    line = refusal(DistributedConfig(secret_file=str(file)))
    assert line.endswith(f"{file} is open to other users; chmod 600 {file}")


def test_a_file_of_another_user(monkeypatch, file):
    monkeypatch.setattr(secret.os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(secret.os, "fstat", _not_roots(os.fstat))
    assert "belongs to another user" in refusal(DistributedConfig(secret_file=str(file)))


def _not_roots(fstat):
    def about(fd):
        found = list(fstat(fd))
        found[4] = 12345
        return os.stat_result(found)

    return about


@pytest.mark.parametrize("content", [b"", b"short", b"   fifteen chars \n", b"\xff"])
def test_what_could_be_guessed(file, content):
    file.write_bytes(content)
    line = refusal(DistributedConfig(secret_file=str(file)))
    assert re.search(r"a secret needs 16; make one: openssl rand -hex 32", line)


def test_a_file_that_is_not_there(tmp_path):
    line = refusal(DistributedConfig(secret_file=str(tmp_path / "none")))
    assert line.startswith("--distributed.secret_file: ")
    assert line.endswith("cannot be read (No such file or directory); name another file")


def test_nowhere_to_keep_one(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file" / "config"))
    line = refusal(DistributedConfig())
    assert line.startswith("a run of several processes needs a secret: ")
    assert line.endswith("set DFLOP_SECRET for all processes")


def test_the_environment_may_not_be_guessable_either(monkeypatch):
    monkeypatch.setenv(SECRET_ENV, "1234")
    assert refusal(DistributedConfig()).startswith("DFLOP_SECRET has 4 characters")
