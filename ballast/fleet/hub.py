"""Download checkpoints by hub id: weights, configuration and tokenizer files only, never code.

Used by `fleet.fleet_file` and `fleet.fleet_source` for models whose path is a hub id.
"""

from __future__ import annotations

import re

from ballast.core.errors import ConfigError, brief

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "*.model",
]


def is_hub_id(text: str) -> bool:
    """Whether `text` reads as ``org/name`` or ``org/name@revision``."""
    return _HUB_ID.fullmatch(text) is not None


def fetch(hub_id: str, key: str) -> str:
    """Directory of the snapshot of ``org/name[@revision]``, downloaded where it is not cached.

    Raises ConfigError naming `key`: no such repository, no access, or no network and not cached.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = hub_id.partition("@")
    try:
        return str(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
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
