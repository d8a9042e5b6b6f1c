"""Find the directory of a checkpoint or an adapter that an entry names: by path, or by hub id.

Used by `fleet.fleet_file`. A directory that is not there is named with the reason: a dangling link,
an empty mount point, a file in another format, a hub id that cannot be fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ballast.core.errors import ConfigError
from ballast.fleet.gguf_entry import gguf_directory, is_gguf
from ballast.fleet.hub import is_hub_id
from ballast.fleet.unfinished_download import unfinished

CATALOGUE = "catalogue:"
"""Prefix of the name of a public model, in place of a path: only its sizes are known."""


class DirectoryKind(NamedTuple):
    """What an entry's directory has to be."""

    file: str
    """A file that it must have."""
    described: str


CHECKPOINT = DirectoryKind(
    "config.json",
    "a checkpoint directory (config.json, *.safetensors, tokenizer files), a GGUF file",
)
ADAPTER = DirectoryKind(
    "adapter_config.json",
    "an adapter's directory (adapter_config.json, adapter_model.safetensors)",
)


def find_directory(
    text: str,
    key: str,
    base: Path,
    fetch_hub: Callable[[str, str], str],
    wanted: DirectoryKind,
) -> str:
    """Return the directory that `text` names: a path first, a hub id if there is none. Relative
    paths start at `base`. Raises ConfigError with the directory that was looked in."""
    if text.startswith(CATALOGUE):
        why = "models of the catalogue are sizes without weights, for simulations"
        raise ConfigError(key, text, f"{why}; give {wanted.described}")
    hub_id = text.removeprefix("hf:")
    local = base / os.path.expanduser(text)  # which, unlike pathlib, takes any text
    if wanted == CHECKPOINT and text == hub_id and is_gguf(local):
        return gguf_directory(local, key, text)
    if text == hub_id and (os.path.lexists(local) or not is_hub_id(text)):
        if (reason := _missing(local, wanted.file)) is not None:
            allowed = f"{reason}; it must be {wanted.described}, or a hub id such as hf:org/name"
            raise ConfigError(key, text, f"{allowed}; looked in {local}")
        return str(local)
    if not is_hub_id(hub_id):
        allowed = "a hub id reads hf:org/name or hf:org/name@revision; with :Q4_K_M, a GGUF file"
        raise ConfigError(key, text, allowed)
    try:
        found = Path(fetch_hub(hub_id, key))
    except ConfigError as error:
        if text != hub_id:
            raise
        why = f"there is no directory {local}; as a hub id: {error.allowed}"
        raise ConfigError(key, text, why) from error
    if wanted == CHECKPOINT and is_gguf(found):
        return gguf_directory(found, key, text)
    return str(found)


def _missing(directory: Path, file: str) -> str | None:
    """Return why a directory cannot be what is wanted, which must have `file`; None if it can."""
    try:
        there = os.listdir(directory)
    except FileNotFoundError:
        if directory.is_symlink():
            return f"it is a link to {os.readlink(directory)}, which is not there"
        return "there is no such directory: is its volume mounted?"
    except NotADirectoryError:
        return "it is no directory"
    except (OSError, ValueError) as error:  # ValueError: a name that no path can have
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    if not there:
        return "the directory is empty: is its volume mounted?"
    wanted = directory / file
    if wanted.is_file():
        return None
    left = unfinished(directory)
    return f"it has no {file}" + ("" if left is None else f"; it is {left}")
