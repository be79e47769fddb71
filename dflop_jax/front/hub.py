"""Models and data sets by their names on Hugging Face's hub: from the local cache, else fetched
into it.

Only files that are read as data are fetched: of a model weights as safetensors, JSON, tokenizer and
template; of a data set tables, records, shards and media.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflop_jax.cluster.ending import TryAgain
from dflop_jax.config import DataConfig
from dflop_jax.data.build import hub_datasets
from dflop_jax.data.datasets.find_tables import hub_files
from dflop_jax.folders import writing

NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
CONFIG, INDEX, ONE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_REASON = 200  # characters of what the hub's library says
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")


@dataclass(frozen=True)
class Wanted:
    """What is looked for on the hub, and what messages say of it.

    Attributes:
      asked: the flag and its value.
      files: patterns of what is fetched.
      remedy: what may be given in its place.
    """

    asked: str
    kind: Literal["model", "dataset"]
    repo: str
    revision: str | None
    files: tuple[str, ...]
    remedy: str

    @property
    def mark(self) -> str:
        """The name of its files beside those of the cache."""
        return f".dflop-{self.kind}s--{self.repo.replace('/', '--')}"

    def is_in(self, folder: Path) -> bool:
        """Whether a folder of the cache has all of it."""
        return is_whole(folder) if self.kind == "model" else not _half(self).exists()


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
    from dflop_jax.weights import adapter

    remedy = "or give a folder that transformers' save_pretrained wrote"
    wanted = Wanted(f"--model {name}", "model", match[1], match[2], FILES, remedy)
    folder = _folder(wanted, tell)
    if not is_whole(folder):
        if (folder / adapter.CONFIG).is_file() and not (folder / CONFIG).is_file():
            adapter.refuse_pickle(f"--model {name}")
        raise ValueError(
            f"--model {name}: {folder} has no {CONFIG} or lacks safetensors: it is published in "
            "another form; convert it with transformers' save_pretrained"
        )
    return folder


def fetch_datasets(config: DataConfig, tell: Callable[[str], None] = lambda line: None) -> None:
    """See to it that the cache has what `config` names on the hub, as for `model_folder`. What a
    cache has that others filled is taken to be whole.

    Raises:
      ValueError: no such data set, or one that asks for a login.
      TryAgain: the hub cannot be reached, or the connection was cut.
    """
    for path, repo, folder in hub_datasets(config):
        wanted = Wanted(
            f"data {path}, which is no path here",
            "dataset",
            repo,
            None,
            hub_files(folder),
            "or give a file or folder",
        )
        _folder(wanted, tell)


def _folder(wanted: Wanted, tell: Callable[[str], None]) -> Path:
    """Its folder in the cache, fetched where that has not all of it."""
    if cached := _cached(wanted):
        return cached
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        fetch = "hf download" + " --repo-type dataset" * (wanted.kind == "dataset")
        raise ValueError(
            f"{wanted.asked}: no such folder, and the cache of the hub does not hold it whole "
            f"(HF_HUB_OFFLINE is set); fetch it where there is a network: {fetch} {wanted.repo}, "
            f"{wanted.remedy}"
        )
    with _alone(wanted):
        if cached := _cached(wanted):  # another process has fetched it meanwhile
            return cached
        tell(f"fetching {wanted.repo} from {constants.ENDPOINT}")
        _half(wanted).touch()
        folder = _fetched(wanted)
        _half(wanted).unlink()
        return folder


def _half(wanted: Wanted) -> Path:
    """A file that is there from the begin of a download to its end."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"{wanted.mark}.part")


def _fetched(wanted: Wanted) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                wanted.repo,
                repo_type=wanted.kind,
                revision=wanted.revision,
                allow_patterns=list(wanted.files),
            )
        )
    except HFValidationError as e:
        raise ValueError(f"{wanted.asked}: {e}; give OWNER/NAME, {wanted.remedy}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, RuntimeError) as e:
        raise _refused(wanted, e) from None
    except Exception as e:  # of the HTTP library, whose names change with its version
        if not type(e).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        raise _refused(wanted, e) from None


def _refused(wanted: Wanted, error: Exception) -> Exception:
    """What to raise where the hub does not give it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import RevisionNotFoundError

    # An answer of the hub may be the cause of what was not found in the cache either.
    answers = [getattr(e, "response", None) for e in (error, error.__cause__)]
    code = next((r.status_code for r in answers if r is not None), None)
    if any(isinstance(e, RevisionNotFoundError) for e in (error, error.__cause__)):
        return ValueError(f"{wanted.asked}: the hub has no such revision of it; name another one")
    if code in (401, 403, 404):
        return ValueError(
            f"{wanted.asked}: {constants.ENDPOINT} answers {code}: it has no such {wanted.kind}, "
            "or shows it only to who may see it; mend the name, log in (hf auth login), "
            f"{wanted.remedy}"
        )
    # Its first line alone: what follows advises how to call huggingface_hub.
    why = str(error).strip().partition("\n")[0][:MAX_REASON] or type(error).__name__
    return TryAgain(
        f"{wanted.asked}: the hub cannot be reached, or the connection was cut ({why}); run the "
        f"command again, what has come is kept, {wanted.remedy}"
    )


def _cached(wanted: Wanted) -> Path | None:
    """Its folder in the cache, if all of it is there."""
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError):  # those of huggingface_hub are of these kinds
        folder = Path(
            snapshot_download(
                wanted.repo,
                repo_type=wanted.kind,
                revision=wanted.revision,
                allow_patterns=list(wanted.files),
                local_files_only=True,
            )
        )
        return folder if wanted.is_in(folder) else None
    return None


def is_whole(folder: Path) -> bool:
    """Whether a folder of a model or of adapters has its configuration and every file of weights
    that it should."""
    from dflop_jax.weights import adapter

    if not (folder / CONFIG).is_file():
        return all((folder / file).is_file() for file in (adapter.CONFIG, adapter.WEIGHTS))
    if (folder / INDEX).is_file():
        try:
            files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return all((folder / str(file)).is_file() for file in files)
    return (folder / ONE).is_file()


@contextmanager
def _alone(wanted: Wanted) -> Iterator[None]:
    """Wait until no other process of this host fetches it."""
    from huggingface_hub import constants

    file = Path(constants.HF_HUB_CACHE, f"{wanted.mark}.lock")
    with writing(file, "set HF_HOME to a folder for the hub's files that can be written"):
        lock = file.open("ab")
    with lock:
        with suppress(OSError):  # a file system without locks: huggingface_hub has its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
