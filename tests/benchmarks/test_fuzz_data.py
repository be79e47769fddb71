"""A short pass of the fuzzer over media that are made here, and that it notices what goes wrong."""

from __future__ import annotations

import shutil

import pytest

from tests.benchmarks.scripts import module
from tests.data.media_cases import made_dataset

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


def test_a_child_that_dies_is_a_finding(tmp_path):
    for kind in fuzz_cases.KINDS:
        (tmp_path / kind).mkdir()
    counts, findings = fuzz_data.run(range(7, 8), 0, tmp_path, 60)  # there is no seed to mutate
    assert [(f.case, f.what) for f in findings] == [(7, "death or hang")]
    assert "IndexError" in findings[0].detail
    assert counts == {"death or hang finding": 1}
