"""Read and write TOML files with a fixed set of keys; errors name the file and the key."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from ballast.core.errors import ConfigError
from ballast.fleet.faults import first_fault
from ballast.fleet.schema import Keys

K = TypeVar("K", bound=Keys)

Size = Annotated[int, Field(ge=1)]
"""A count without an upper bound: parameters and bytes exceed the bounds of the fleet file."""
Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def read_keys(file: Path | Traversable, root: type[K]) -> K:
    """Raises ConfigError: the file cannot be read, is not TOML, or a key of it is wrong."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), None, f"it cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), str(error), "the file must be TOML") from error
    try:
        return root.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error, root)
        raise ConfigError(f"{file}: {fault.key}", fault.value, fault.allowed) from None


def as_toml(document: Keys, *comments: str) -> str:
    """Scalars, then tables, then arrays of one table a line. Defaults are left out."""
    values = document.model_dump(exclude_defaults=True)
    lines = [f"# {comment}" for comment in comments]
    lines += [f"{k} = {_value(v)}" for k, v in values.items() if not isinstance(v, dict | list)]
    for key, table in _tables(values):
        lines += ["", f"[{key}]", *(f"{k} = {_value(v)}" for k, v in table.items())]
    arrays = {k: v for k, v in values.items() if isinstance(v, list)}
    for key, entries in arrays.items():
        for entry in entries:
            lines += ["", f"[[{key}]]", *(f"{k} = {_value(v)}" for k, v in entry.items())]
    return "\n".join(lines) + "\n"


def _tables(values: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for key, value in values.items():
        if isinstance(value, dict):
            if all(isinstance(v, dict) for v in value.values()):
                yield from ((f"{key}.{k}", v) for k, v in value.items())
            else:
                yield key, value


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)
