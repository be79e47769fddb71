"""Folders that are made for what a user asks to be written."""

from __future__ import annotations

from pathlib import Path

from dflop_jax.full_disk import FULL


def made(folder: str | Path, remedy: str) -> Path:
    """A folder, made where it is missing, with those above it.

    Raises:
      ValueError: it cannot be made, with the remedy.
      OSError: the disk is full.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        if e.errno in FULL:
            raise
        raise ValueError(f"{path}: cannot be written ({e.strerror}); {remedy}") from None
    return path
