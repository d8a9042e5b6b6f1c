"""Mark fields of dataclasses that stories omit, always or while they have their default.

So stories recorded before such a field existed compare equal. Read by `core.entries`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OMITTED: Mapping[str, Any] = {"omitted": True}
"""Metadata of a field that is omitted while it has its default."""
UNTOLD: Mapping[str, Any] = {"untold": True}
"""Metadata of a field that is always omitted: the story's snapshot has it, or it follows."""
