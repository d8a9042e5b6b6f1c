"""Turn validation errors of settings into `ConfigError`s that name key, value and allowed values.

Used wherever users write settings: fleet file, admin API, simulation files.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ballast.core.errors import ConfigError
from ballast.fleet.document import key_path

HIDDEN = "(hidden)"
"""Placeholder in errors for a value that is, or may be, a secret."""
Pointer = Callable[[str], str | None]
"""Returns the key that an unknown key stands for; None if there is none."""


def unknown(word: str, known: Collection[str]) -> str:
    """Return a hint for a word that is none of `known`: a close one, and all of them."""
    longer = [name for name in known if word and name.lower().startswith(word.lower())]
    close = longer or difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known here: {', '.join(known)}"


def first_fault(
    error: ValidationError,
    root: type[BaseModel],
    *prefix: str,
    pointer: Pointer = lambda word: None,
) -> ConfigError:
    """The first fault of a document that `root` describes; `prefix` leads to the part that was
    looked at, `pointer` from unknown keys to those that were meant."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    return fault_of(first, root, *prefix, pointer=pointer)


def fault_of(
    first: Mapping[str, Any],
    root: type[BaseModel],
    *prefix: str,
    pointer: Pointer = lambda word: None,
) -> ConfigError:
    """Convert one of pydantic's errors to a ConfigError; arguments as of `first_fault`."""
    parts = (*prefix, *first["loc"])
    key, value = key_path(parts), first["input"]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "extra_forbidden":
        word, known = str(parts[-1]), _known_keys(root, parts[:-1])
        meant = pointer(word)
        if meant is not None and (own := meant.strip("`").rpartition(".")[2]) in known:
            meant = f"`{own}`"  # here, wherever else it is as well
        hint = unknown(word, known) if meant is None else f"what it sets is {meant}"
        return ConfigError(key, None, f"there is no such key; {hint}")
    if kind == "missing":
        return ConfigError(key, None, "the key is required")
    if kind == "value_error":
        return ConfigError(key, value, str(context["error"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        known = _known_keys(root, parts)
        return ConfigError(
            key, value, f"a mapping is needed, with keys among: {', '.join(known) or 'any name'}"
        )
    message = first["msg"].replace("Input should", "it should")
    return ConfigError(key, value, message[:1].lower() + message[1:])


def _known_keys(root: type[BaseModel], parts: tuple[str | int, ...]) -> list[str]:
    """Keys of the mapping at `parts`; none where any are allowed."""
    keys: Any = root
    for part in parts:
        if isinstance(part, int):
            (keys,) = get_args(keys)
        elif get_origin(keys) is dict:
            keys = get_args(keys)[1]
        elif part in keys.model_fields:
            keys = keys.model_fields[part].annotation
        if isinstance(keys, UnionType):
            keys = next(k for k in get_args(keys) if k is not NoneType)
    return list(getattr(keys, "model_fields", ()))
