"""A model by its name on Hugging Face's hub: from the local cache, else fetched into it.

Only files that are read as data are fetched: weights as safetensors, JSON, tokenizer and template.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflop_jax.cluster.ending import TryAgain

NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
CONFIG, INDEX, ONE = "config.json", "model.safetensors.index.json", "model.safetensors"
REMEDY = "or give a folder that transformers' save_pretrained wrote"


def model_folder(name: str, tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder that a path, OWNER/NAME or OWNER/NAME@REVISION names.

    What the cache has whole is taken as it is. Else one process of a host fetches, the others wait
    for it. `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` count as for huggingface_hub.

    Args:
      tell: is told, in a line, that something is fetched.

    Raises:
      ValueError: no such folder, no such model, or one that asks for a login.
      TryAgain: the hub cannot be reached, or the connection was cut.
    """
    path = Path(name)
    match = NAME.fullmatch(name)
    if path.exists() or match is None:
        if not path.is_dir():
            raise ValueError(
                f"--model {name}: no such folder, nor OWNER/NAME of a model on the hub; give one "
                "with config.json, safetensors and tokenizer.json"
            )
        return path
    repo, revision = match[1], match[2]
    if cached := _cached(repo, revision):
        return cached
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"--model {name}: no such folder, and the cache of the hub does not hold it whole "
            f"(HF_HUB_OFFLINE is set); fetch it where there is a network: hf download {repo}, "
            f"{REMEDY}"
        )
    with _alone(repo):
        if cached := _cached(repo, revision):  # another process has fetched it meanwhile
            return cached
        tell(f"fetching {name} from {constants.ENDPOINT}")
        return _fetched(name, repo, revision)


def _fetched(name: str, repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=FILES))
    except HFValidationError as e:
        raise ValueError(f"--model {name}: {e}; give OWNER/NAME, {REMEDY}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, RuntimeError) as e:
        raise _refused(name, e) from None
    except Exception as e:  # of the HTTP library, whose names change with its version
        if not type(e).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        raise _refused(name, e) from None
    if not is_whole(folder):
        raise ValueError(
            f"--model {name}: {folder} has no {CONFIG} or lacks safetensors: it is published in "
            "another form; convert it with transformers' save_pretrained"
        )
    return folder


def _refused(name: str, error: Exception) -> Exception:
    """What to raise where the hub does not give a model."""
    from huggingface_hub import constants
    from huggingface_hub.errors import RevisionNotFoundError

    # An answer of the hub may be the cause of what was not found in the cache either.
    answers = [getattr(e, "response", None) for e in (error, error.__cause__)]
    code = next((r.status_code for r in answers if r is not None), None)
    if any(isinstance(e, RevisionNotFoundError) for e in (error, error.__cause__)):
        return ValueError(f"--model {name}: the model has no such revision; name another one")
    if code in (401, 403, 404):
        return ValueError(
            f"--model {name}: {constants.ENDPOINT} answers {code}: it has no such model, or shows "
            f"it only to who may see it; mend the name, log in (hf auth login), {REMEDY}"
        )
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return TryAgain(
        f"--model {name}: the hub cannot be reached, or the connection was cut ({why}); run the "
        f"command again, what has come is kept, {REMEDY}"
    )


def _cached(repo: str, revision: str | None) -> Path | None:
    """The model's folder in the cache, if all of it is there."""
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError):  # those of huggingface_hub are of these kinds
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=FILES, local_files_only=True)
        )
        return folder if is_whole(folder) else None
    return None


def is_whole(folder: Path) -> bool:
    """Whether a folder has its configuration and every file of weights that it should."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / INDEX).is_file():
        try:
            files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return all((folder / str(file)).is_file() for file in files)
    return (folder / ONE).is_file()


@contextmanager
def _alone(repo: str) -> Iterator[None]:
    """Wait until no other process of this host fetches the model."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".dflop-{repo.replace('/', '--')}.lock").open("ab")
    except OSError as e:
        raise ValueError(
            f"{folder}: the hub's cache cannot be written ({e.strerror}); set HF_HOME to a folder "
            "that can"
        ) from None
    with lock:
        with suppress(OSError):  # a file system without locks: huggingface_hub has its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
