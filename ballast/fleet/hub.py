"""Download checkpoints by hub id: weights, configuration and tokenizer files only, never code.

Used by `fleet.fleet_file` and `fleet.fleet_source` for models whose path is a hub id. Of a
repository of GGUF files one is chosen, by the end of its name.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ballast.core.errors import ConfigError, brief
from ballast.fleet.gguf_entry import SPLIT
from ballast.fleet.gguf_header import SUFFIX
from ballast.fleet.hub_download import Report, check_size, reporting

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?(:[\w.-]+)?")
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "*.model",
]


def is_hub_id(text: str) -> bool:
    """Whether `text` reads as ``org/name`` or ``org/name@revision``, perhaps with the end of a GGUF
    file's name, as in ``org/name:Q4_K_M``."""
    return _HUB_ID.fullmatch(text) is not None


def fetch(
    hub_id: str, key: str, report: Report | None = None, most_bytes: int | None = None
) -> str:
    """Directory of the snapshot of ``org/name[@revision]``, downloaded where it is not cached; of a
    repository of GGUF files the first file of the one that ``:`` and the end of its name choose.
    `report` is called meanwhile; nothing is downloaded of more than `most_bytes`.

    Raises ConfigError naming `key`: no such repository, no access, no such file, or no network and
    not cached.
    """
    from huggingface_hub import snapshot_download

    whole, _, chosen = hub_id.partition(":")
    name, _, revision = whole.partition("@")
    bars = None if report is None else reporting(report)
    with _faults_named(hub_id, key, revision):
        files: list[str] = []
        if chosen or "gguf" in re.split(r"[-_.]", name.lower()):
            files = choose_gguf(_gguf_files(name, revision or None), chosen, hub_id, key)
        wanted = [glob.escape(file) for file in files] or _WANTED
        if most_bytes is not None:
            check_size(name, revision or None, wanted, most_bytes, hub_id, key)
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=wanted, tqdm_class=bars
        )
    if not files:
        return str(found)
    log.info("%s: %s: %s", key, hub_id, ", ".join(files))
    return str(Path(found) / files[0])


def choose_gguf(files: Iterable[str], chosen: str, hub_id: str, key: str) -> list[str]:
    """Return the parts of the one model among GGUF files whose name, or whose folder's, ends with
    `chosen`; empty: the only one. Raises ConfigError naming `key`, with what there is."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        split = SPLIT.fullmatch(file)
        stem = split[1] if split else file[: -len(SUFFIX)]
        if not PurePosixPath(file).name.lower().startswith("mmproj"):  # it sees images
            models.setdefault(stem, []).append(file)
    end = re.compile(rf"(.*[^a-z0-9_])?{re.escape(chosen.lower())}", re.DOTALL)
    fitting = [
        stem
        for stem in models
        if not chosen or any(end.fullmatch(part.lower()) for part in PurePosixPath(stem).parts)
    ]
    if len(fitting) == 1:
        return models[fitting[0]]
    there = ", ".join(PurePosixPath(stem).name for stem in models) or "none"
    if fitting and chosen:
        there = ", ".join(PurePosixPath(stem).name for stem in fitting)
        why = f"several GGUF files end so: {there}"
    elif chosen:
        why = f"no GGUF file of it ends so; it has {there}"
    else:
        why = f"it has these GGUF files: {there}; name one by its end, as in org/name:Q4_K_M"
    raise ConfigError(key, hub_id, why)


def _gguf_files(name: str, revision: str | None) -> list[str]:
    """Return the paths of a repository's GGUF files: of its snapshot if the hub cannot be
    reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        files = HfApi().list_repo_files(name, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except OSError:
        root = Path(snapshot_download(name, revision=revision, local_files_only=True))
        files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return [file for file in files if file.lower().endswith(SUFFIX)]


@contextmanager
def _faults_named(hub_id: str, key: str, revision: str) -> Iterator[None]:
    """Raise ConfigError for what the hub's library raises."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except ConfigError:
        raise
    except GatedRepoError as error:
        allowed = "access to it is gated: accept its terms and log in (hf auth login)"
        raise ConfigError(key, hub_id, allowed) from error
    except RevisionNotFoundError as error:
        raise ConfigError(key, hub_id, f"the repository has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        allowed = "the hub has no such model, or it is private: check the name, or hf auth login"
        raise ConfigError(key, hub_id, allowed) from error
    except HFValidationError as error:
        raise ConfigError(key, hub_id, f"not a hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        allowed = (
            f"it is not in the local cache ({constants.HF_HUB_CACHE}) and the hub could not be "
            "reached: download it where there is a network, and give its directory as path"
        )
        raise ConfigError(key, hub_id, allowed) from error
    except Exception as error:  # whatever else the library, or the hub's answer, makes it raise
        raise ConfigError(key, hub_id, f"it could not be fetched: {brief(error)}") from error
