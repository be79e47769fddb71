"""What every command shares with a terminal: a parser, printing, progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def show(what: Any) -> None:
    """Print a line or a table to stdout."""
    Console().print(what)


def note(line: str) -> None:
    """Print a line to stderr, beside the answer."""
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


def ticker(name: str) -> Callable[[int, int], None]:
    """A function that shows progress (done, total) as one rewritten line of a terminal."""
    console = Console(stderr=True)

    def tick(done: int, total: int) -> None:
        if console.is_terminal:
            console.print(f"{name} {done}/{total}", end="\r" if done < total else "\n")

    return tick
