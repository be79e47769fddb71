"""Scripts of `benchmarks/` on instances that take seconds."""

from __future__ import annotations

import shutil

import pytest

from tests.data.media_cases import made_dataset

from .scripts import module

# ---- auto_choice.py


def test_chosen_policies_are_counted_by_overlap():
    auto_choice = module("auto_choice")
    chosen = {"a": ("orch", "orch", "dflop"), "b": ("dip", "orch", "dip")}
    rows = [
        auto_choice.Choice(name, 8, overlap, policy, "p", "none", step_s * (3 - overlap), 1.0)
        for name, step_s in (("a", 1.0), ("b", 7.0))
        for overlap, policy in zip((1.0, 0.5, 0.0), chosen[name], strict=True)
    ]
    assert auto_choice.count_wins(rows) == {
        1.0: ({"orch": 1, "dip": 1}, 1.0),
        0.5: ({"orch": 2}, 1.25),
        0.0: ({"dflop": 1, "dip": 1}, 1.5),
    }


# ---- fuzz_data.py


fuzz_cases, fuzz_data = module("fuzz_cases"), module("fuzz_data")

CASES = 150
FOLDERS = {".png": "images", ".jpg": "images", ".gif": "images", ".mp4": "videos", ".wav": "audio"}


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Media by kind, in folders as those of the shared data."""
    folder = tmp_path_factory.mktemp("media")
    for file in made_dataset(folder / "made").parent.iterdir():
        if kind := FOLDERS.get(file.suffix):
            (folder / kind).mkdir(exist_ok=True)
            shutil.copy(file, folder / kind)
    return folder


@pytest.mark.slow
def test_mutated_files_are_samples_or_named_as_bad(media):
    counts, findings = fuzz_data.run(range(CASES), 1, media, 300)
    assert findings == []
    assert counts.total() == CASES
    results = {r: sum(n for key, n in counts.items() if key.endswith(r)) for r in ("good", "bad")}
    assert sum(results.values()) == CASES
    assert min(results.values()) > CASES / 10
    assert {key.partition(" ")[0] for key in counts} == {w.__name__ for w, _ in fuzz_cases.WAYS}
