"""The server of `dflop watch`: what it answers, to whom, and how the command ends."""

import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from dflop_jax.cli import main
from dflop_jax.report.html import page
from dflop_jax.report.reader import RunReader
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.watch import PageServer, Watch
from tests.report.runs import make_row


@contextmanager
def served(*folders):
    """A server of run folders, under way."""
    readers = [RunReader(folder.name, folder) for folder in folders]
    with PageServer(Watch(readers), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, **headers):
    request = urllib.request.Request(server.url + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return answer.read().decode()


def refusal(server, path, **headers):
    """The code of a refusal, whose answer holds its socket until it is closed."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, path, **headers)
    with refused.value as answer:
        return answer.code


def append(folder, steps):
    with RunFolder(folder, existing="resume") as run:
        for i in steps:
            run.append(make_row(i))


def test_news_are_what_was_added(make_run):
    folder = make_run(n_steps=3)
    with served(folder) as server:
        html = ask(server, "")
        first = json.loads(html.split('id="data">')[1].split("</script>")[0])
        assert first["version"]
        assert "connect-src 'self'" in html
        same = json.loads(ask(server, f"data?version={first['version']}"))
        assert sorted(same) == ["stamp", "status", "version"]
        assert same["stamp"] == first["stamp"]
        append(folder, range(3, 5))
        news = json.loads(ask(server, f"data?version={first['version']}"))
        assert news["version"] != first["version"]
        (loss,) = (c for c in news["charts"] if c["title"] == "loss")
        assert news["axes"][loss["lines"][0]["axis"]] == [0, 1, 2, 3, 4]
        assert loss["lines"][0]["y"] == pytest.approx([5.0 / (1 + i) for i in range(5)], rel=1e-5)
        assert "5 steps of 100" in news["status"][0]
        assert "<td>5</td>" in news["tables"]
        (folder / "plan.json").write_bytes((folder / "plan.json").read_bytes())
        again = json.loads(ask(server, f"data?version={news['version']}"))
        assert again["stamp"] != news["stamp"]  # the page loads itself again


def test_the_live_page_is_the_report_with_what_follows(make_run):
    folder = make_run()
    with served(folder) as server:
        live, frozen = ask(server, ""), page([folder])
    assert "fetch(" in live
    assert "fetch(" not in frozen
    assert "connect-src" not in frozen
    for part in ('<section id="timelines"', 'id="charts"', '<table id="figures">'):
        assert part in live
        assert part in frozen


def test_only_this_machine_is_answered(make_run):
    with served(make_run()) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host in ("evil.example", f"evil.example:{server.server_port}"):
            assert refusal(server, "", Host=host) == 403
        assert "Figures" in ask(server, "", Host=f"localhost:{server.server_port}")
        assert refusal(server, "etc/passwd") == 404


def refused(capsys, *words):
    assert main(["watch", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_mistakes_are_said_in_a_line(make_run, tmp_path, capsys):
    run = make_run()
    assert "no such run folder" in refused(capsys, tmp_path / "nothing")
    assert "from 0" in refused(capsys, run, "--port", 70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refused(capsys, run, "--port", taken.getsockname()[1])
    assert "give another" in said


def test_the_command_serves_until_it_is_interrupted(make_run, tmp_path, capsys, monkeypatch):
    def interrupted(self, poll_s=0.5):
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    with socket.socket() as taken:  # or nobody does: then the port is free
        try:
            taken.bind(("127.0.0.1", 8700))
            taken.listen()
        except OSError:
            pass
        (tmp_path / "later").mkdir()
        assert main(["watch", str(make_run()), str(tmp_path / "later"), "--json"]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["runs"] == ["run", "later"]
    (waits,) = [line for line in said.err.splitlines() if "no run has begun" in line]
    assert "later" in waits
    assert not answer["url"].endswith(":8700/")
    assert answer["url"] in said.err
