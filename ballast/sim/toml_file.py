"""TOML files whose keys are known: read and checked, or an error that names file and key."""

from __future__ import annotations

import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from ballast.core.errors import ConfigError
from ballast.fleet.faults import first_fault
from ballast.fleet.schema import Keys

K = TypeVar("K", bound=Keys)

Size = Annotated[int, Field(ge=1)]
"""Parameters and bytes exceed what counts in a fleet file may be."""
Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def read_keys(file: Path | Traversable, root: type[K]) -> K:
    """Raises ConfigError: the file cannot be read, is not TOML, or a key of it is wrong."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("profile", str(file), f"it cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), str(error), "the file must be TOML") from error
    try:
        return root.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error, root)
        raise ConfigError(f"{file}: {fault.key}", fault.value, fault.allowed) from None
