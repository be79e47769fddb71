"""The `dflop` command; a file for each command."""

from dflop_jax.cli.main import main

__all__ = ["main"]
