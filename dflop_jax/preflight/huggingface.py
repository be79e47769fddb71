"""Finds models and datasets of the Hugging Face hub in the cache of `huggingface_hub`, or downloads
them into it: only data files, no code and no pickles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from huggingface_hub import constants, errors, get_cached_repo_tree, snapshot_download
from huggingface_hub.utils import HfUri

from dflop_jax.config import DataConfig
from dflop_jax.data.build import hub_datasets
from dflop_jax.data.datasets.readers import HUB_ID, hub_files
from dflop_jax.distributed.process_exit import TransientError
from dflop_jax.folders import make_folder

NAME = re.compile(rf"({HUB_ID.pattern})(?:@([\w./-]+))?")
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")


def model_folder(name: str, log: Callable[[str], None]) -> Path:
    """Return the folder of a path, OWNER/NAME or OWNER/NAME@REVISION, downloaded if needed. `log`
    gets one line when a download starts.

    Raises:
      ValueError: no such folder, no such model, no access to it, or offline and not in the cache.
      TransientError: the hub cannot be reached, or the download was interrupted.
    """
    path, match = Path(name), NAME.fullmatch(name)
    if path.is_dir():
        return path
    if path.exists() or match is None:
        raise ValueError(
            f"--model {name}: no such folder, nor OWNER/NAME of a model on the hub; give one "
            "with config.json, safetensors and tokenizer.json"
        )
    return _snapshot(f"--model {name}", HfUri("model", match[1], match[2]), FILES, log)


def fetch_datasets(config: DataConfig, log: Callable[[str], None]) -> None:
    """Download the hub's datasets in `config` that the cache lacks. Errors are those of
    `model_folder`."""
    for path, uri in hub_datasets(config):
        _snapshot(f"data {path}, which is not a local path", uri, hub_files(uri), log)


def _snapshot(subject: str, uri: HfUri, files: Sequence[str], log: Callable[[str], None]) -> Path:
    """Return the folder of a repository in the cache; error messages call it `subject`."""
    download = partial(
        snapshot_download,
        uri.id,
        repo_type=uri.type,
        revision=uri.revision,
        allow_patterns=list(files),
        ignore_patterns="consolidated*",  # a copy of the weights
    )
    with suppress(OSError, errors.CachedRepoTreeNotFoundError):
        folder = download(local_files_only=True)
        if uri.type == "model":  # without a file list the cache may be incomplete
            get_cached_repo_tree(uri.id, revision=uri.revision)
        return Path(folder)
    if not constants.HF_HUB_OFFLINE:
        log(f"fetching {uri.id} from {constants.ENDPOINT}")
        make_folder(constants.HF_HUB_CACHE, "set HF_HOME to a folder that can be written")
    try:
        return Path(download())
    except Exception as e:  # from huggingface_hub, its HTTP library, or the disk
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{subject}: no such folder, and the hub's cache does not have all of it "
                "(HF_HUB_OFFLINE is set); on a host with network: hf download --repo-type "
                f"{uri.type} {uri.id}, or give a path"
            ) from None
        # The cause of an error about the cache may be the hub's response.
        answers = [x for x in (e, e.__cause__) if isinstance(x, errors.HfHubHTTPError)]
        if answers and (status := answers[0].response.status_code) in (401, 403, 404):
            is_revision = isinstance(answers[0], errors.RevisionNotFoundError)
            raise ValueError(
                f"{subject}: {constants.ENDPOINT} answers {status}: no such "
                f"{'revision' if is_revision else uri.type}, or no access to it; correct the name, "
                "ask for access on its page, log in (hf auth login), or give a path"
            ) from None
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        raise TransientError(
            f"{subject}: the hub cannot be reached, or the download was interrupted ({reason}); "
            "run the command again, finished files are kept, or give a path"
        ) from None
