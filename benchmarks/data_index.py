"""Time to know the shapes of a large mixture: made once from headers and text, then read back.

    python benchmarks/data_index.py --records 1000000

The records are written here: questions about a few pictures, and text alone. About 3 minutes, most
of it the first index. Expected on one slow core: 2 s to have all counts of the second run.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.counts import Preprocessing
from dflop_jax.data.datasets.mixture import Mixture, Part
from dflop_jax.data.datasets.mixture_source import MixtureSource
from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.text.pieces import chat_pieces

PICTURES = 200


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    tokenizer = ByteTokenizer()
    numbers: dict[str, float] = {"records": args.records}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        mixture = Mixture((Part(str(write_records(folder, args.records))),))
        for run in ("first", "second"):
            start_s = time.perf_counter()
            source = MixtureSource(
                mixture,
                Preprocessing(AnyRes()),
                lambda turns: chat_pieces(turns, tokenizer),
                "bytes",
                index_file=folder / "index.npz",
            )
            counts = source.counts()
            numbers[f"{run}_s"] = time.perf_counter() - start_s
        assert len(counts) == args.records
        numbers["index_bytes"] = (folder / "index.npz").stat().st_size
        numbers["llm_tokens"] = int(counts.llm_tokens.sum())
    numbers["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = Table("", "value")
    for name, value in numbers.items():
        table.add_row(name, f"{value:.2f}" if name.endswith("_s") else f"{value:,.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
