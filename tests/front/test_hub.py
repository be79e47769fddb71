"""A model or data set by its name on the hub, from a server on this host: each case in a process
of its own, since huggingface_hub reads its variables once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data.build import hub_datasets
from dflop_jax.preflight.huggingface import model_folder
from tests.data.media_cases import talk
from tests.front.hub_server import NAME, SHA, hub_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
FILES = {
    "config.json": b'{"model_type": "qwen3_vl"}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-1.safetensors": b"1" * 5000,
    "model-2.safetensors": b"2" * 5000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "consolidated.safetensors": b"3" * 5000,
}
ASK = """
import sys
from dflop_jax.distributed.process_exit import RunFailed, exit_code_of
from dflop_jax.preflight.huggingface import model_folder
try:
    print(model_folder(sys.argv[1], lambda line: print("told", line, file=sys.stderr)))
except (ValueError, RunFailed) as e:
    print(e, file=sys.stderr)
    sys.exit(exit_code_of(e))
"""


@pytest.fixture
def hub():
    with hub_of(FILES) as running:
        yield running


@pytest.fixture
def start(hub, tmp_path):
    """Begins to look for a model in a process with a cache of this test."""

    def begin(name=NAME, ask=ASK, **variables):
        variables = {
            "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0", **variables,
        }  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return subprocess.Popen(
            [sys.executable, "-c", ask, name], cwd=tmp_path, env=kept | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return begin


ASK_DATA = """
import sys
from dflop_jax.distributed.process_exit import RunFailed, exit_code_of
from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.preflight.huggingface import fetch_datasets
try:
    path, tell = sys.argv[1], lambda line: print("told", line, file=sys.stderr)
    fetch_datasets(DataConfig(path=path), tell)
    reader = open_reader(path)
    record = reader.read(*reader.locate())
    print(record.turns[0][1], len(record.media))
except (ValueError, RunFailed) as e:
    print(e, file=sys.stderr)
    sys.exit(exit_code_of(e))
"""


def over(process):
    """(exit code, stdout, stderr) of it."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out.strip(), err.strip()


@pytest.mark.slow
def test_each_file_that_is_data_is_fetched_once_and_cached(hub, start):
    codes, folders, errs = zip(*map(over, [start(), start()]), strict=True)
    assert codes == (0, 0), errs
    assert len(set(folders)) == 1
    folder = Path(folders[0])
    assert folder.name == SHA  # the revision, which the run's config.json has in model.size
    wanted = FILES.keys() - {"pytorch_model.bin", "modeling.py", "consolidated.safetensors"}
    assert {f.name for f in folder.iterdir()} == wanted
    assert {name: hub.asked[name] for name in FILES} == {n: int(n in wanted) for n in FILES}
    asked = hub.asked.total()
    assert over(start(HF_HUB_OFFLINE="1"))[:2] == (0, folders[0])
    assert over(start(HF_ENDPOINT="http://127.0.0.1:9"))[:2] == (0, folders[0])
    assert over(start())[:2] == (0, folders[0])
    assert hub.asked.total() == asked


@pytest.mark.parametrize("what, status", [("status", 401), ("file_status", 403)])
def test_what_asks_for_a_login(hub, start, what, status):
    setattr(hub, what, status)
    code, _, err = over(start())
    assert code == 2, err
    assert f"answers {status}: no such model, or no access to it" in err
    assert "log in (hf auth login)" in err
    assert err.splitlines()[-1].startswith(f"--model {NAME}: ")


def test_an_unknown_name_and_an_unknown_revision(start):
    for name, says in (("owner/none", "no such model"), (f"{NAME}@gone", "no such revision")):
        code, _, err = over(start(name))
        assert code == 2, err
        assert says in err


def test_nobody_answers(start):
    code, _, err = over(start(HF_ENDPOINT="http://127.0.0.1:9"))
    assert code == 4, err
    assert re.search(
        r"the hub cannot be reached, or the download was interrupted \(.+\); run the", err
    )
    assert "locate the files" not in err  # advice to who calls huggingface_hub
    code, _, err = over(start(HF_HUB_OFFLINE="1"))
    assert code == 2
    assert f"hf download --repo-type model {NAME}" in err


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path
    for name in ("gone", str(tmp_path / "gone"), "a b/c", ""):
        with pytest.raises(ValueError, match="no such folder, nor OWNER/NAME"):
            model_folder(name) if name else model_folder("no/such/model")


def test_a_cache_that_cannot_be_written(start, tmp_path):
    (tmp_path / "hf").write_text("a file")
    code, _, err = over(start())
    assert code == 2, err
    assert err.endswith("set HF_HOME to a folder that can be written")


def parquet(rows):
    """A Parquet file of these rows."""
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), buffer := pa.BufferOutputStream())
    return buffer.getvalue().to_pybytes()


@pytest.mark.slow
def test_a_data_set_is_fetched_as_a_model_is(hub, start):
    row = {"conversations": talk("<image> Hello?", "Yes."), "image": "pictures/a.PNG"}
    hub.files = {
        "data/train-00000.parquet": parquet([row]),
        "pictures/a.PNG": b"any bytes",
        "load.py": b"code",
        "cache.pickle": b"code",
    }
    for name in (NAME, f"hf://datasets/{NAME}"):
        code, said, err = over(start(name, ask=ASK_DATA))
        assert code == 0, err
        assert said.startswith("<image> Hello?")
    assert hub.asked["load.py"] == hub.asked["cache.pickle"] == 0
    asked = hub.asked.total()
    assert over(start(ask=ASK_DATA))[0] == 0
    assert hub.asked.total() == asked
    code, _, err = over(start("owner/none", ask=ASK_DATA))
    assert code == 2, err
    assert "answers 404: no such dataset" in err


def test_which_data_are_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here/there").mkdir(parents=True)
    Path("mix.yaml").write_text("- owner/set\n- here/there\n- hf://datasets/o/n/train\n")

    def names(path, **more):
        found = hub_datasets(DataConfig(path=path, **more))
        return [(uri.id, uri.revision, uri.path_in_repo) for _, uri in found]

    assert names("owner/set") == [("owner/set", None, "")]
    assert names("mix.yaml") == [("owner/set", None, ""), ("o/n", None, "train")]
    assert names("hf://datasets/o/n@v2/a/b") == [("o/n", "v2", "a/b")]
    assert names("here/there", eval_path="o/held") == [("o/held", None, "")]
    for mistake in (
        "here/their",
        "gone/train.json",
        "gone/a.parquet",
        "a/b/c",
        "",
        "one",
        "a/b--c",
    ):
        assert names(mistake) == []
    with pytest.raises(ValueError, match="must be 'namespace/name', got 'one'"):
        names("hf://datasets/one")
