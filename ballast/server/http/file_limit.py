"""Raise the limit of open files, and check at start that it suffices for the fleet."""

from __future__ import annotations

import json
import resource
from pathlib import Path

from ballast.core.errors import ConfigError
from ballast.core.settings import FleetSettings

OTHER_FILES = 256
"""Open files other than connections and segments of weights: libraries, pipes, workers' sockets and
shared memory."""
SPARE = 64
"""Connections beyond the limit that are still accepted, so that clients get an error response, and
probes are answered."""
LEAST_CONNECTIONS = 64
"""Least number of connections with which a server starts."""
_MOST_LAYERS = 1000
"""Most layers that are counted; checkpoints with more are refused elsewhere."""
_MORE_SEGMENTS = 4
"""Segments of a model beside its layers."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files of this process, and of those that it starts, to the hard
    limit; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def check_files(fleet: FleetSettings) -> None:
    """Raise ConfigError where the process may not open as many files as a fleet needs."""
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
    """Layers of a model, each a segment with a file of its own; 0 where its checkpoint does not
    say."""
    try:
        config = json.loads((Path(checkpoint) / "config.json").read_text("utf-8"))
        found = config.get("text_config", config)["num_hidden_layers"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0
    return min(found, _MOST_LAYERS) if isinstance(found, int) and found > 0 else 0
