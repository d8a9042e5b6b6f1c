"""Define the types of the fleet file's values in pydantic: sizes, names, secrets, hosts.

Used by `fleet.schema`, the admin API and the files of simulations.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ballast.core.units import parse_bytes

OS_PAGE = 4096
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+")


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a size is needed, for example 512MiB, 2GB or 1048576")
    return parse_bytes(value)


def _bandwidth(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("a bandwidth is needed, for example 4GB/s")
    return float(parse_bytes(value))


LEAST_KEY = 16
"""Least characters of an API key: a server bounds no guesses."""


def secret_text(value: Any) -> str:
    """Return an API key's text as the header carries it: a number would have lost leading zeros by
    now. Raises ValueError, without the key."""
    if not isinstance(value, str):
        raise ValueError('a text is needed: write it as "${NAME}", in quotes, and set NAME')
    if not value:
        raise ValueError("it must not be empty: is the environment variable empty?")
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise ValueError("a key consists of printable ASCII characters other than the space")
    if len(value) < LEAST_KEY:
        raise ValueError(
            f"a key has {LEAST_KEY} characters or more, as shorter ones can be guessed; "
            "`openssl rand -hex 24` makes one"
        )
    return value


def _origin(value: str) -> str:
    if value != "*" and not _ORIGIN.fullmatch(value):
        raise ValueError("an origin reads https://host or https://host:port, without a path; or *")
    return value


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("a host reads ballast.example, without scheme, port or path")
    return value


def _page(value: Any) -> int:
    size = _size(value)
    if size < OS_PAGE or size & (size - 1):
        raise ValueError("a page is a power of two of at least 4KiB, for example 256KiB or 2MiB")
    return size


def _in_path(name: str) -> str:
    """Refuse a name that clients could not put into a path: they drop these parts of one."""
    wrong = next((part for part in name.split("/") if part in ("", ".", "..")), None)
    if wrong is not None:
        raise ValueError(f"a name has no part {wrong!r} between slashes")
    return name


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0, lt=2**63)]
SizeOrNone = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=2**63)]


def _switch(value: Any) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError("it is 1 or 0")


Switch = Annotated[bool, BeforeValidator(_switch)]
PageSize = Annotated[int, BeforeValidator(_page)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth), Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128),
    AfterValidator(_in_path),
]
Context = Annotated[int, Field(ge=2, lt=2**31)]
"""A token of the prompt, and one to generate."""
DeviceName = Annotated[str, Field(min_length=1, max_length=128)]
Origin = Annotated[str, AfterValidator(_origin)]
Host = Annotated[str, AfterValidator(_host)]
HubPattern = Annotated[str, Field(pattern=r"^[\w.*-]+/[\w.*:@/-]+$", max_length=256)]
"""Of hub ids, with a slash: `*` alone would mean any model of anybody."""
Secret = Annotated[str, BeforeValidator(secret_text)]
Placement = Literal[
    "weights", "work", "follow", "both", "kvpr", "link", "swiftcache", "price", "random"
]
"""Names of fleet policies."""
