"""A mixture as a source: loads that hold, limits that are kept, text cut only where it must be."""

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import make_source
from dflop_jax.data.media.mel import MelSpec
from tests.data.media_cases import SHARED, made_dataset
from tests.data.views import (
    from_pictures,
    heard,
    llm_tokens,
    media_spec,
    n_tiles,
    n_windows,
    newlines,
    seen,
    supervised,
    tiles,
    tokens,
)

SOUND = MelSpec(n_mels=4, window_s=1, max_windows=3)
SPECS = {
    "tiles": media_spec(28, 4, sound=SOUND),
    "anyres": media_spec(28, 4, "anyres", 4, SOUND),
    "dynamic": media_spec(28, 4, "dynamic", sound=SOUND),
    "pictures only": media_spec(28, 4, "anyres", 4),
    "sound only": media_spec(sound=SOUND),
}


def text_tokens(sample):
    media = from_pictures(sample) | newlines(sample) | (heard(sample) >= 0)
    return int((~media).sum())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return str(made_dataset(tmp_path_factory.mktemp("data")))


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("form", SPECS)
def test_every_sample_is_as_its_load_says(form, dataset, tmp_path):
    spec = SPECS[form]
    config = DataConfig(path=dataset, max_tokens=4096, max_frames=4, max_bad_fraction=1.0)
    found = make_source(config, spec, index_dir=tmp_path)
    assert len(found) > 0
    assert found.name == dataset
    kinds = set()
    for i in range(len(found)):
        sample, load = found.sample(i), found.load(i)
        assert sample.load == load
        assert found.label(i)
        kinds |= {m for m, n in (("vision", n_tiles(load)), ("audio", n_windows(load))) if n}
        assert supervised(sample).any()
        assert seen(sample).max(initial=-1) < max(4 * n_tiles(load), 1)
        assert (n_tiles(load) > 0) == from_pictures(sample).any()
    tail, modules = [found.load(i) for i in found.tail()], ("vision", "audio", "llm")
    for load in (found.load(i) for i in range(len(found))):
        assert any(all(t.tokens(m) >= load.tokens(m) for m in modules) for t in tail)
    assert kinds == set(spec.media)


def test_text_is_cut_and_what_cannot_fit_is_left_out(dataset, tmp_path, caplog):
    spec = SPECS["tiles"]

    def source(**more):
        config = DataConfig(path=dataset, max_frames=4, max_bad_fraction=1.0, **more)
        return make_source(config, spec, index_dir=tmp_path)

    whole = source(max_tokens=4096)
    longest = max(llm_tokens(whole.load(i)) for i in range(len(whole)))
    cut = source(max_tokens=longest - 5)
    dropped = source(max_tokens=longest - 5, oversize="drop")
    assert len(dropped) < len(whole)
    assert "exceed data.max_tokens" in caplog.text
    for found in (cut, dropped):
        loads = [found.load(i) for i in range(len(found))]
        assert max(map(llm_tokens, loads)) <= longest - 5
        assert all(found.sample(i).load == load for i, load in enumerate(loads))
    with pytest.raises(ValueError, match=r"exceed data\.max_tokens=.*raise it"):
        source(max_tokens=longest - 5, oversize="error")
    with pytest.raises(ValueError, match=r"exceed data\.max_tokens=1 "):
        source(max_tokens=1)


def test_blank_images_change_pixels_only(dataset, tmp_path):
    config = DataConfig(path=dataset, max_tokens=4096, max_frames=4, max_bad_fraction=1.0)
    seen = make_source(config, SPECS["anyres"], index_dir=tmp_path)
    blank = make_source(
        DataConfig(**{**vars(config), "blank_images": True}), SPECS["anyres"], index_dir=tmp_path
    )
    for i in range(len(seen)):
        a, b = seen.sample(i), blank.sample(i)
        np.testing.assert_array_equal(tokens(a), tokens(b))
        assert a.load == b.load
        assert (tiles(b) == 128).all()


def test_a_yaml_mixture(dataset, tmp_path):
    file = tmp_path / "mixture.yaml"
    file.write_text(
        f"parts:\n  - path: {dataset}\n    weight: 2\n  - path: {dataset}\n    subset: first:1\n"
    )
    config = DataConfig(path=str(file), max_tokens=4096, max_frames=4, max_bad_fraction=1.0)
    once = make_source(
        DataConfig(**{**vars(config), "path": dataset}), SPECS["tiles"], index_dir=tmp_path
    )
    assert len(make_source(config, SPECS["tiles"], index_dir=tmp_path)) == 2 * len(once) + 1


@pytest.mark.parametrize(
    "config, spec, message",
    [
        (DataConfig(), media_spec(sound=SOUND), "pictures, which this model does not take"),
        (DataConfig(path="no.yaml"), SPECS["tiles"], "no.yaml"),
        (DataConfig(path="no.json"), SPECS["anyres"], "no.json"),
        (DataConfig(tokenizer="."), SPECS["anyres"], "leave data.tokenizer empty"),
        (DataConfig(tokenizer=".", path="x"), SPECS["anyres"], "tokenizer.json: no such file"),
    ],
)
def test_what_cannot_be_read_is_refused(config, spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as e:
        make_source(config, spec, index_dir=tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not there")
def test_all_real_media_in_one_model(tmp_path):
    config = DataConfig(path=str(SHARED), max_tokens=2048, max_frames=8, max_tiles=4)
    found = make_source(config, SPECS["tiles"], index_dir=tmp_path)
    loads = [found.load(i) for i in range(len(found))]
    assert len(found) >= 140
    assert sum(n_windows(load) > 0 for load in loads) == 17


@pytest.mark.parametrize("form", ["tiles", "anyres", "dynamic"])
def test_media_that_do_not_fit_are_made_smaller(form, dataset, tmp_path, caplog):
    def source(**more):
        config = DataConfig(path=dataset, max_frames=5, max_bad_fraction=1.0, **more)
        return make_source(config, SPECS[form], index_dir=tmp_path)

    whole = source(max_tokens=4096)
    assert "fewer tiles or frames" not in caplog.text
    loads = {whole.label(i): whole.load(i) for i in range(len(whole))}
    first = next(i for i in range(len(whole)) if "[1]" in whole.label(i))
    picture = whole.label(first)
    text = text_tokens(whole.sample(first))  # all of it is needed: the answer is short
    limit = text + (llm_tokens(loads[picture]) - text) // 2
    small = source(max_tokens=limit)
    assert "fewer tiles or frames to fit data.max_tokens" in caplog.text
    found = {small.label(i): i for i in range(len(small))}
    for label, i in found.items():
        sample, load = small.sample(i), small.load(i)
        assert sample.load == load
        assert llm_tokens(load) <= limit
        assert supervised(sample).any()
        assert n_tiles(load) <= n_tiles(loads[label])
    assert text_tokens(small.sample(found[picture])) == text
    dropped = source(max_tokens=limit, oversize="drop")
    assert picture not in {dropped.label(i) for i in range(len(dropped))}
