"""The secret of a run: whoever has it belongs to the run, whoever has not is a stranger.

Where a process finds it, the first that applies:

    flag          --distributed.secret_file, a file that nobody but its owner may read
    environment   DFLOP_SECRET; `dflop launch` makes a new one for every run
    default       ~/.config/dflop/secret, made on first use: all processes of one user with one
                  home directory have the same

It is never sent (see `handshake`) and stands on no command line, which every user can read.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dflop_jax.config import DistributedConfig

SECRET_ENV = "DFLOP_SECRET"
LEAST_CHARACTERS = 16  # of a secret
_MOST_BYTES = 4096  # that are read of its file
_MAKE_ONE = "openssl rand -hex 32"


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def find_secret(config: DistributedConfig) -> bytes:
    """The secret of this process's run.

    Raises:
      ValueError: it is too short, or its file cannot be read or can be read by others.
    """
    if config.secret_file:
        return _read(Path(config.secret_file), "--distributed.secret_file")
    if given := os.environ.get(SECRET_ENV):
        return _long_enough(given, SECRET_ENV)
    path = default_file()
    if not path.exists():
        _make(path)
    return _read(path, "the secret of your runs")


def default_file() -> Path:
    """The file that holds a user's secret."""
    try:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # a user without a home directory
        raise ValueError(_advice("no home directory to keep it in")) from None
    return home / "dflop" / "secret"


def _make(path: Path) -> None:
    """Write a new secret to `path`, unless another process does so at the same moment."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_secret() + "\n")
        try:
            # A link appears with its content or not at all, on network storage too.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    except OSError as e:
        raise ValueError(_advice(f"{path} cannot be written ({e.strerror})")) from None


def _read(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES)
    except OSError as e:
        raise ValueError(
            f"{name}: {path} cannot be read ({e.strerror}); name another file"
        ) from None
    if about.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{name}: {path} belongs to another user, who then knows the secret; make your own"
        )
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{name}: {path} is open to other users; chmod 600 {path}")
    return _long_enough(text.decode(errors="replace"), f"{name}: {path}")


def _long_enough(text: str, name: str) -> bytes:
    secret = text.strip()
    if len(secret) < LEAST_CHARACTERS:
        raise ValueError(
            f"{name} has {len(secret)} characters, a secret needs {LEAST_CHARACTERS}; make one: "
            f"{_MAKE_ONE}"
        )
    return secret.encode()


def _advice(why: str) -> str:
    return f"a run of several processes needs a secret: {why}; set {SECRET_ENV} for all processes"
