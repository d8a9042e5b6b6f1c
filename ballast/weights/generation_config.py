"""Read a checkpoint's `generation_config.json`: sampling parameters that its makers recommend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast.core.sampling_defaults import SamplingDefaults
from ballast.weights.config import GENERATION, read_json

_KEYS: dict[str, tuple[str, type[int] | type[float], Callable[[Any], bool]]] = {
    "temperature": ("temperature", float, lambda n: 0 <= n <= 2),
    "top_p": ("top_p", float, lambda n: 0 < n <= 1),
    "top_k": ("top_k", int, lambda n: -1 <= n < 2**31),
    "min_p": ("min_p", float, lambda n: 0 <= n <= 1),
    "repetition_penalty": ("repetition_penalty", float, lambda n: 0.01 <= n <= 100),
    "max_tokens": ("max_new_tokens", int, lambda n: 1 <= n < 2**31),
}
"""By field of `SamplingDefaults`: key, type, and the values, of finite ranges, that requests may
have, too."""


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling parameters that a checkpoint recommends; values that no request may have
    are left out. `do_sample: false` is greedy, whatever else it says. Raises CheckpointError for a
    file that cannot be read."""
    path = directory / GENERATION
    if not path.is_file():
        return SamplingDefaults()
    values = read_json(path)
    found: dict[str, Any] = {}
    for name, (key, kind, allowed) in _KEYS.items():
        value = values.get(key)
        known = int if kind is int else (int, float)
        if isinstance(value, known) and not isinstance(value, bool) and allowed(value):
            found[name] = kind(value)
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingDefaults(**found)
