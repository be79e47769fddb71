"""Time to know the shapes of a large mixture: made once from headers and text, then read back.

    python benchmarks/data_index.py --records 1000000

The records are written here: questions about a few pictures, and text alone. The index is made in
threads of this process and, as runs do it, in processes. About 4 minutes, most of it in threads.
Expected on two cores: processes take half as long; 2 s to have all counts of the last run.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.header_rows import RowsApart, RowsHere
from dflop_jax.data.datasets.mixture import Mixture, MixturePart
from dflop_jax.data.datasets.mixture_source import IndexRules, MixtureSource, open_readers
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.tiles import TileMedium
from dflop_jax.data.pool.messages import DecoderReply, DecoderSetup
from dflop_jax.data.text.pieces import TemplateFields, TextPiece, chat_pieces

PICTURES = 200
TOKENIZER = ByteTokenizer()
TIMEOUT_S, MEMORY_BYTES = 60.0, 4 << 30


def write_records(folder: Path, n: int) -> Path:
    """A JSONL of n records, three of four with a picture."""
    rng = np.random.default_rng(0)
    for k in range(PICTURES):
        width, height = rng.integers(100, 3000, 2).tolist()
        Image.new("L", (width, height)).save(folder / f"{k}.png", compress_level=1)
    file = folder / "records.jsonl"
    with file.open("w") as out:
        for k in range(n):
            picture = {"image": f"{k % PICTURES}.png"} if k % 4 else {}
            tag = "<image>\n" if picture else ""
            answer = "It shows a " + "very " * int(rng.integers(0, 40)) + f"good number {k}."
            turns = [{"from": "human", "value": f"{tag}What is this?"},
                     {"from": "gpt", "value": answer}]  # fmt: skip
            out.write(json.dumps({"id": k, **picture, "conversations": turns}) + "\n")
    return file


def pieces(turns: Sequence[tuple[str, str]], _: TemplateFields) -> tuple[TextPiece, ...]:
    return chat_pieces(turns, TOKENIZER)


def open_rows(arguments: Mapping[str, Any]) -> Callable[[bytes, object], DecoderReply]:
    """What answers for the index, in another process."""
    return RowsHere(open_readers(Mixture((MixturePart(arguments["path"]),))), pieces).answer


def main() -> None:
    # Here: processes that make rows import this file as one of a package.
    from json_rows import Rows, add_json, merged

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    add_json(parser)
    args = parser.parse_args()
    rows = Rows(args.json, merged)
    rows.append({"records": args.records})
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = str(write_records(folder, args.records))
        setup = DecoderSetup("benchmarks.data_index:open_rows", {"path": path}, MEMORY_BYTES)
        for run in ("first_in_threads", "first", "second"):
            start_s = time.perf_counter()
            source = MixtureSource(
                Mixture((MixturePart(path),)),
                {"vision": TileMedium(AnyRes())},
                pieces,
                IndexRules(
                    folder / ("threads.npz" if run == "first_in_threads" else "index.npz"),
                    "bytes",
                    None if run == "first_in_threads" else partial(RowsApart, setup, TIMEOUT_S),
                ),
            )
            counts = source.counts()
            rows.append({f"{run}_s": time.perf_counter() - start_s})
        assert len(counts) == args.records
        rows.append({"index_bytes": (folder / "index.npz").stat().st_size,
                     "llm_tokens": int(counts.all_tokens.sum())})  # fmt: skip
    rows.append({"peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
    table = Table("", "value")
    for name, value in merged(rows).items():
        table.add_row(name, f"{value:.2f}" if name.endswith("_s") else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
