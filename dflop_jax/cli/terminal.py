"""Helpers of the commands: an argument parser, printing, progress."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

PROGRESS_INTERVAL_S = 10.0  # between progress lines in a log (not a terminal)


class _StoreOnce(argparse.Action):
    """Stores a flag's value, and reports an error if the flag is given twice."""

    _namespace: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string and self._namespace is namespace:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        self._namespace = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, and repeated flags as errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


# flag -> (metavar, help) for an option, or help for a switch
Options = dict[str, tuple[str, str] | str]


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    for flag, about in options.items():
        if isinstance(about, str):
            parser.add_argument(flag, action="store_true", help=about)
        else:
            parser.add_argument(flag, metavar=about[0], help=about[1])


def positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def show(content: Any) -> None:
    """Print a line or table to stdout. In a narrow terminal, wide columns wrap; no text is cut."""
    for column in content.columns if isinstance(content, Table) else ():
        column.overflow = "fold"
    Console().print(content)


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], **options: Any
) -> Table:
    new_table = Table(*columns, title=title or None, title_justify="left", **options)
    for row in rows:
        new_table.add_row(*row)
    return new_table


def print_note(line: str) -> None:
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


class DelayedNotes:
    """Lines for stderr that are held back until `show`, so that an error found before is printed
    alone; lines added after `show` are printed at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_shown = False

    def add(self, line: str, shows_now: bool = False) -> None:
        self._lines.append(line)
        if shows_now or self._is_shown:
            self.show()

    def show(self) -> None:
        for line in self._lines:
            print_note(line)
        self._lines, self._is_shown = [], True


def make_ticker(
    name: str, unit: str = "", *, starts_shown: bool = False
) -> Callable[[int, int], None]:
    """Return a function (done, total) that shows progress: it rewrites one line of a terminal, or
    prints a line every `PROGRESS_INTERVAL_S`. With `starts_shown` the name is printed at once."""
    console = Console(stderr=True, soft_wrap=True)
    if starts_shown:
        console.print(name, end="\r" if console.is_terminal else "\n")
    printed_s = time.monotonic()

    def tick(n_done: int, total: int) -> None:
        nonlocal printed_s
        progress_line = f"{name}: {n_done} of {total} {unit}".rstrip()
        if console.is_terminal:
            console.print(progress_line, end="\r" if n_done < total else "\n")
        elif time.monotonic() - printed_s >= PROGRESS_INTERVAL_S:
            console.print(progress_line)
            printed_s = time.monotonic()

    return tick
