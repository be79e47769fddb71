"""Rows of a benchmark: each is printed as it is made and is then in the file of --json, which is
whole at any time.

    rows = Rows(args.json)                     # a list of the rows; see `frame` for other files
    for case in cases:
        rows.append(measure(case))
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec


class Rows(list[Any]):
    """A list whose `append` prints the row and writes all so far.

    Args:
      file: where to; None writes nothing.
      frame: what the file holds of the rows: `list`, `as_rows` or the like.
      rows: those of an earlier call, to go on with.
    """

    def __init__(
        self,
        file: Path | None,
        frame: Callable[[Sequence[Any]], object] = list,
        rows: Iterable[Any] = (),
    ) -> None:
        super().__init__(rows)
        self._file, self._frame = file, frame

    def append(self, row: Any) -> None:
        super().append(row)
        # Not among what the script shows at its end.
        print(shortened(row), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write the rows again, where some were completed after they were made."""
        write_json(self._file, self._frame(self))


def as_rows(rows: Sequence[Any]) -> dict[str, Any]:
    return {"rows": rows}


def write_json(file: Path | None, value: object) -> None:
    """Write a file whole or not at all; numbers that are not finite become null."""
    if file is not None:
        fresh = file.with_name(f"{file.name}.tmp")
        fresh.write_bytes(msgspec.json.format(_encoded(value), indent=1) + b"\n")
        fresh.replace(file)


def shortened(row: object, longest: int = 200) -> str:
    """A row in a line, or the beginning of it."""
    line = _encoded(row).decode()
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _encoded(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Paths as text, numpy's numbers as Python's."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag --json of a script."""
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write the rows there, each as it is made"
    )


def _new_file(text: str) -> Path:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder; make it first")
    return Path(text)
