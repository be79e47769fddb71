"""A model or data set by its name on the hub, from a server on this host: each case in a process
of its own, since huggingface_hub reads its variables once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data.build import hub_datasets
from tests.data.media_cases import talk

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
NAME, SHA = "owner/small", "0123456789abcdef0123456789abcdef01234567"
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
from dflop_jax.config import DataConfig
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.distributed.process_exit import RunFailed, exit_code_of
from dflop_jax.preflight.huggingface import fetch_datasets, model_folder
path, of_data = sys.argv[1:]
try:
    if of_data:
        fetch_datasets(DataConfig(path=path), lambda line: None)
        reader = open_reader(path)
        record = reader.read(*reader.locate())
        print(record.turns[0][1], len(record.media))
    else:
        print(model_folder(path, lambda line: None))
except (ValueError, RunFailed) as e:
    print(e, file=sys.stderr)
    sys.exit(exit_code_of(e))
"""


class Hub:
    """A hub with these files of one model, or data set of the same name: statuses of answers about
    what there is and of those that send a file, and how often each path was got."""

    def __init__(self, files):
        self.files, self.status, self.file_status, self.asked = files, 200, 200, Counter()

    def answer(self, path):
        """(status, body, headers) for a path."""
        path = path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        name = path.removeprefix(f"/{NAME}/resolve/{SHA}/")
        status = self.file_status if "/resolve/" in path else self.status
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": f} for f in self.files]
            body = json.dumps({"id": NAME, "sha": SHA, "siblings": siblings}).encode()
        elif path == f"/api/models/{NAME}/tree/{SHA}":
            tree = [
                {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for f, b in self.files.items()
            ]
            body = json.dumps(tree).encode()
        elif name in self.files:
            body = self.files[name]
        else:
            known = path.startswith(f"/api/models/{NAME}/")
            code = "RevisionNotFound" if known else "RepoNotFound"
            return 404, b"", {"X-Error-Code": code}
        etag = f'"{hashlib.sha1(body).hexdigest()}"'
        return status, body * (status == 200), {"ETag": etag, "X-Repo-Commit": SHA}


@pytest.fixture
def hub():
    running = Hub(FILES)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            status, body, headers = running.answer(urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            return body

        def do_GET(self):
            running.asked[urlsplit(self.path).path.rpartition("/")[2]] += 1
            self.wfile.write(self.do_HEAD())

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.url = f"http://127.0.0.1:{server.server_port}"
        yield running
        server.shutdown()


@pytest.fixture
def start(hub, tmp_path):
    """Begins to look for a model or data in a process with a cache of this test."""

    def begin(name=NAME, of_data="", **variables):
        variables = {
            "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0", **variables,
        }  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return subprocess.Popen(
            [sys.executable, "-c", ASK, name, of_data], cwd=tmp_path, env=kept | variables,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return begin


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
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {}):
        assert over(start(**variables))[:2] == (0, folders[0])
    assert hub.asked.total() == asked


def test_what_cannot_be_fetched(hub, start):
    login = (
        "no such model, or no access to it; correct the name, ask for access on its page, log in"
    )
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    for statuses, name, variables, expected, says in (
        ((401, 200), NAME, {}, 2, f"answers 401: {login}"),
        ((200, 403), NAME, {}, 2, f"answers 403: {login}"),
        ((200, 200), "owner/none", {}, 2, "no such model"),
        ((200, 200), f"{NAME}@gone", {}, 2, "no such revision"),
        ((200, 200), NAME, nobody, 4, "reached, or the download was interrupted ("),
        ((200, 200), NAME, {"HF_HUB_OFFLINE": "1"}, 2, f"hf download --repo-type model {NAME}"),
        ((200, 200), NAME, {"HF_HOME": __file__}, 2, "set HF_HOME to a folder that can be"),
    ):
        hub.status, hub.file_status = statuses
        code, _, err = over(start(name, **variables))
        assert (code, says in err.splitlines()[-1]) == (expected, True), err
        assert "locate the files" not in err  # advice to who calls huggingface_hub


@pytest.mark.slow
def test_a_data_set_is_fetched_as_a_model_is(hub, start):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {"conversations": talk("<image> Hello?", "Yes."), "image": "pictures/a.PNG"}
    parquet.write_table(pa.Table.from_pylist([row]), buffer := pa.BufferOutputStream())
    hub.files = {
        "data/train-00000.parquet": buffer.getvalue().to_pybytes(), "pictures/a.PNG": b"any bytes",
        "load.py": b"code", "cache.pickle": b"code",
    }  # fmt: skip
    for name in (NAME, f"hf://datasets/{NAME}"):
        code, said, err = over(start(name, "data"))
        assert code == 0, err
        assert said.startswith("<image> Hello?")
    assert hub.asked["load.py"] == hub.asked["cache.pickle"] == 0
    asked = hub.asked.total()
    assert over(start(NAME, "data"))[0] == 0
    assert hub.asked.total() == asked
    code, _, err = over(start("owner/none", "data"))
    assert (code, "answers 404: no such dataset" in err) == (2, True), err


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
    mistakes = ("here/their", "gone/train.json", "gone/a.parquet", "a/b/c", "", "one", "a/b--c")
    assert all(names(mistake) == [] for mistake in mistakes)
    with pytest.raises(ValueError, match="must be 'namespace/name', got 'one'"):
        names("hf://datasets/one")
