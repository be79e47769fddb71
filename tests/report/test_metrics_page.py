"""docs/watching.md names every key of metrics.jsonl, and no other."""

import dataclasses
import re
from pathlib import Path

from dflop_jax.report.metrics import StepMetrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"


def test_every_key_is_explained():
    table = PAGE.read_text(encoding="utf-8").partition("## metrics.jsonl")[2]
    named = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    keys = [key for cell in named for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(keys) == sorted(f.name for f in dataclasses.fields(StepMetrics))
