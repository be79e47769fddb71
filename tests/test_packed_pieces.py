"""Where pieces lie: segment ids and offsets against loops, and files that are damaged or old."""

import json

import numpy as np
import pytest

from dflop_jax.records import PackedPieces, from_json, to_json
from dflop_jax.records.files import load


@pytest.mark.parametrize("seed", range(6))
def test_places_of_pieces_are_what_loops_over_rows_say(seed):
    """Segment ids, and tokens before a piece in its row, in whatever order the entries stand."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 30)) if seed else 0
    places = PackedPieces(np.stack((rng.permutation(n), *rng.integers(0, 3, (3, n)))))
    length = rng.integers(1, 50, n)
    seen = {}
    for entry, (_, *row) in enumerate(places.columns.T.tolist()):
        before = seen.setdefault(tuple(row), [])
        assert places.segment[entry] == len(before) + 1
        assert places.row_offsets(length)[entry] == sum(before)
        before.append(length[entry])
    rows = places.sorted_by_row()
    ordered = sorted(map(tuple, places.columns.T.tolist()), key=lambda e: (*e[1:], e[0]))
    assert list(map(tuple, rows.columns.T.tolist())) == ordered
    assert from_json(to_json(rows), PackedPieces) == rows


@pytest.mark.parametrize(
    "columns", ['[4, "eJw"]', '[4, "eJxjAAAAAQAB"]', '[3, ""]', "5", '["x", ""]', "[4, 7]", "null"]
)
def test_damaged_places_are_refused_in_one_line(columns, tmp_path):
    text = json.dumps({"record": "PackedPieces", "version": 3, "value": {"columns": 0}})
    (tmp_path / "r.json").write_text(text.replace('"columns": 0', f'"columns": {columns}'))
    with pytest.raises(ValueError, match=r"r\.json") as failed:
        load(PackedPieces, tmp_path / "r.json")
    assert "\n" not in str(failed.value)
