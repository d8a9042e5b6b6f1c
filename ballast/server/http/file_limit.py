"""Raise the limit of open files, and check at start that it suffices for the fleet."""

from __future__ import annotations

import json
import resource
from pathlib import Path

from ballast.core.errors import ConfigError
from ballast.core.settings import FleetSettings

OTHER_FILES = 256
"""Neither connections nor segments of weights: libraries, pipes, sockets and memory of workers."""
SPARE = 64
"""Connections beyond the most that there may be, so that clients are refused in words, and probes
are answered."""
LEAST_CONNECTIONS = 64
"""A server that may have fewer is not worth starting."""
_MOST_LAYERS = 1000
"""No model has as many: a checkpoint that says so is refused elsewhere."""
_MORE_SEGMENTS = 4
"""Of a model, beside its layers."""


def raise_file_limit() -> int:
    """Let this process, and those that it starts, have as many files as it may; how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def check_files(fleet: FleetSettings) -> None:
    """Raises ConfigError where the process may not have the files that a fleet needs."""
    most = raise_file_limit()
    needed = OTHER_FILES + SPARE + LEAST_CONNECTIONS
    for model in fleet.models:
        needed += _layers(model.path) + _MORE_SEGMENTS + len(model.adapters)
    if most < needed:
        raise ConfigError(
            "open files",
            most,
            f"this fleet needs {needed} at least: raise the hard limit (`ulimit -Hn {needed}`, "
            "systemd's LimitNOFILE, a container's --ulimit nofile)",
        )


def _layers(checkpoint: str) -> int:
    """Of a model, each a segment with a file of its own; 0 where its checkpoint does not say."""
    try:
        config = json.loads((Path(checkpoint) / "config.json").read_text("utf-8"))
        found = config.get("text_config", config)["num_hidden_layers"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0
    return min(found, _MOST_LAYERS) if isinstance(found, int) and found > 0 else 0
