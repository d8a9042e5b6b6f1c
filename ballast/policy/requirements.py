"""What a preset requires of the device that it runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a memory policy declares; one without a declaration requires nothing."""

    kv_swapping: bool = False
    """KV lies layer by layer, and that of some layers moves between device and host in each step.
    Layers of weights do not rotate then: a job waits for one or the other."""
    dirty: bool = False
    """Of such a layer only what a step has written goes back to the host; else all of it."""
