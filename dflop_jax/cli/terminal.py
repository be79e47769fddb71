"""What commands share: an argument parser, printing, progress."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

NOTE_DELAY_S = 8.0  # seconds that notes wait for a mistake to be found
PROGRESS_INTERVAL_S = 10.0  # seconds between lines of progress where they stay, as in a log


class _StoreOnce(argparse.Action):
    """Stores a flag's value; an error where the command line gives the flag twice."""

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
    """An argument parser that reports an error in one line, with exit code 2, also for a flag of
    one value that is given twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def flags_of(self, command: str) -> list[str]:
        """The flags of a sub-command."""
        (commands,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return [
            flag for action in commands.choices[command]._actions for flag in action.option_strings
        ]


def show(content: Any) -> None:
    """Print a line or a table to stdout. In a narrow terminal its widest columns wrap first, and no
    text is cut."""
    for column in content.columns if isinstance(content, Table) else ():
        column.overflow = "fold"
    Console().print(content)


def make_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], **options: Any
) -> Table:
    """A table with its title at the left; `options` are those of rich."""
    new_table = Table(*columns, title=title or None, title_justify="left", **options)
    for row in rows:
        new_table.add_row(*row)
    return new_table


def print_note(line: str) -> None:
    """Print a line to stderr, beside the answer."""
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


class DelayedNotes:
    """Lines for stderr that wait until they are ready, or for `NOTE_DELAY_S`: a mistake that is
    found meanwhile stands alone, and whoever waits for long sees what for."""

    def __init__(self) -> None:
        self._lines: list[str] | None = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(NOTE_DELAY_S, self.show)
        self._timer.daemon = True
        self._timer.start()

    def add(self, line: str, shows_now: bool = False) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.append(line)
            else:
                print_note(line)
        if shows_now:
            self.show()

    def show(self) -> None:
        """Print what waits, and what comes from now on at once."""
        with self._lock:
            lines, self._lines = self._lines or [], None
            for line in lines:
                print_note(line)
        self._timer.cancel()

    def drop(self) -> None:
        """Never print what waits."""
        self._timer.cancel()
        with self._lock:
            self._lines = []


def make_ticker(
    name: str, unit: str = "", *, starts_shown: bool = False
) -> Callable[[int, int], None]:
    """A function that shows progress (done, total): as one rewritten line of a terminal, elsewhere
    as a line now and then.

    Args:
      starts_shown: print the name before anything is done.
    """
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
