"""Mark fields of dataclasses that stories omit while they have their default.

So stories recorded before such a field existed compare equal. Read by `core.entries`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OMITTED: Mapping[str, Any] = {"omitted": True}
"""Metadata of such a field."""
