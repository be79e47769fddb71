"""`dflop watch`: a page on this machine that follows runs while they write."""

from __future__ import annotations

import argparse
import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflop_jax.cli.terminal import note, show

PORT = 8700  # of the page, where none is asked for; any free one would do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The page is that of dflop report. It is served to this machine alone; from another one: "
        f"ssh -L {PORT}:127.0.0.1:{PORT} HOST."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is the base")
    parser.add_argument(
        "--port", type=int, help=f"default: {PORT}, or a free one where it is taken"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the page until Ctrl-C."""
    from dflop_jax.cli.report import trace_memory
    from dflop_jax.report.compare import run_names
    from dflop_jax.report.reader import RunReader
    from dflop_jax.report.run_folder import has_begun
    from dflop_jax.report.watch import Watch

    names = run_names([Path(f) for f in args.runs])
    for folder in names.values():
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: no such run folder; check the path, or start the run first"
            )
    watch = Watch([RunReader(name, folder) for name, folder in names.items()], trace_memory)
    with _server(watch, args.port) as server:
        say = note if args.json else show
        say(f"{server.url} shows {', '.join(names)}; Ctrl-C ends it")
        for folder in names.values():
            if not has_begun(folder):
                say(f"{folder}: no run has begun there; the page waits for one")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        return {"url": server.url, "runs": [*names]}


def _server(watch: Any, port: int | None) -> Any:
    from dflop_jax.report.watch import PageServer

    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"--port {port}: a port must be from 0 (any free one) to 65535")
    try:
        return PageServer(watch, PORT if port is None else port)
    except OSError as e:
        if e.errno == errno.EADDRINUSE and port is None:
            return PageServer(watch, 0)
        raise ValueError(
            f"--port {port}: cannot be listened on ({e.strerror}); give another, or none"
        ) from None
