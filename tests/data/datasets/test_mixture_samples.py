"""A mixture as a source: loads that hold, limits that are kept, samples cut where they must be."""

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, make_source
from dflop_jax.data.media.counts import largest_rows
from dflop_jax.data.media.mel import MelSpec
from tests.data import views
from tests.data.media_cases import made_dataset
from tests.data.views import llm_tokens, media_spec, n_tiles, supervised

SOUND = MelSpec(n_mels=4, window_s=1, max_windows=3)
PLACEHOLDER = ByteTokenizer.placeholder_id
SPECS = {
    "tiles": media_spec(28, 4, sound=SOUND),
    "anyres": media_spec(28, 4, "anyres", 4, SOUND),
    "dynamic": media_spec(28, 4, "dynamic", sound=SOUND),
    "native": MediaSpec.of(
        {"vision": {"form": "native", "patch_px": 16, "merge": 2, "frames": 2}}, {}
    ),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return str(made_dataset(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize(
    "config, spec, message",
    [
        (DataConfig(), media_spec(sound=SOUND), "need a model that takes pictures"),
        (DataConfig(path="no.yaml"), SPECS["tiles"], "no.yaml"),
        (DataConfig(tokenizer="."), SPECS["anyres"], "leave data.tokenizer empty"),
        (DataConfig(tokenizer=".", path="x"), SPECS["anyres"], "tokenizer.json: no such file"),
    ],
)
def test_what_cannot_be_read_is_refused(config, spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as e:
        make_source(config, spec, index_dir=tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("form", ["tiles", "anyres", "dynamic", "native"])
def test_a_cut_sample_is_the_first_tokens_of_the_whole(form, dataset, tmp_path, caplog):
    def source(max_tokens, **more):
        config = DataConfig(path=dataset, max_tokens=max_tokens, max_frames=4, min_pixels=32**2,
                            max_pixels=256**2, max_bad_fraction=1.0, **more)  # fmt: skip
        return make_source(config, SPECS[form], index_dir=tmp_path)

    found = source(10**6)
    whole = {found.label(i): found.sample(i) for i in range(len(found))}
    loads = [found.load(i) for i in range(len(found))]
    assert [sample.load for sample in whole.values()] == loads
    largest = [loads[i] for i in found.largest_samples()]
    for load in loads:
        modules = ("vision", "audio", "llm")
        assert any(all(x.tokens(m) >= load.tokens(m) for m in modules) for x in largest)
    pictures = next(sample for label, sample in whole.items() if label.endswith("[2]"))
    stands = pictures.fields["llm"]["tokens"] == PLACEHOLDER
    end = int(np.flatnonzero(stands)[-1]) + 1  # of the last picture, which stays
    n_cut = 0
    for limit in (44, 60, 100, end, 158):
        caplog.clear()
        found, lost = source(limit), 0
        for i in range(len(found)):
            sample, load, all_ = found.sample(i), found.load(i), whole[found.label(i)]
            n, fields = llm_tokens(load), all_.fields["llm"]
            assert sample.load == load
            assert supervised(sample).any()
            stands = (all_.fields["llm"]["tokens"] == PLACEHOLDER)[n : limit + 1]
            assert n == min(limit, llm_tokens(all_.load)) or (stands.all() and len(stands) > 0)
            for name, values in sample.fields["llm"].items():
                end = -1 if name in ("targets", "weights") else None
                np.testing.assert_array_equal(values[:end], fields[name][:n][:end])
            for module in ("vision", "audio"):
                assert len(load.lengths(module)) <= len(all_.load.lengths(module))
                for name, values in sample.fields.get(module, {}).items():
                    expected = all_.fields[module][name][: len(values)]
                    np.testing.assert_array_equal(values, expected)
            for pair, places in sample.gathers.items():
                np.testing.assert_array_equal(places.index, all_.gathers[pair].index[:n])
            lost += len(load.lengths("vision")) < len(all_.load.lengths("vision"))
        assert (f" {lost} of " in caplog.text and "before some of" in caplog.text) or not lost
        n_cut += lost
    assert n_cut
    kept = source(100, oversize="drop")
    assert {kept.label(i) for i in range(len(kept))} == {
        label for label, sample in whole.items() if llm_tokens(sample.load) <= 100
    }
    with pytest.raises(ValueError, match=r"max_tokens=.*dataset\.json\[\d+\] has .*; raise it"):
        source(100, oversize="error")
    with pytest.raises(ValueError, match=r"exceed data\.max_tokens=1 "):
        source(1)


def test_media_behind_the_cut_are_not_decoded(tmp_path):
    path = made_dataset(tmp_path, 3)
    config = DataConfig(path=str(path), max_tokens=120, max_bad_fraction=1.0)
    found = make_source(config, SPECS["tiles"], index_dir=tmp_path)
    i = next(i for i in range(len(found)) if "[2]" in found.label(i))
    before = found.sample(i)
    assert n_tiles(before.load) == 18  # of two pictures of three
    (tmp_path / "grey.png").write_bytes(b"damaged since")
    np.testing.assert_array_equal(views.tiles(found.sample(i)), views.tiles(before))


def test_the_most_demanding_ask_for_all_that_any_does():
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 30, 200):
        asks = rng.integers(0, 6, (n, 3)) * rng.integers(0, 2, (n, 3))
        chosen = largest_rows(asks, 1000)
        for row in asks:
            assert any((asks[k] >= row).all() for k in chosen)
        for k in chosen:  # none for nothing
            assert not any((asks[j] >= asks[k]).all() for j in chosen if j != k)
        assert largest_rows(asks, 2) == chosen[:2]
