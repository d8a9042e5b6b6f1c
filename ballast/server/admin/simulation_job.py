"""Define the job of a simulation of this server's fleet, and the lines by which it answers.

`simulations` sends it to a child process; `bench.served_fleet` is the child's program.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ballast.core.cost import StepCosts
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.server.observe.recent_requests import TracedRequest

HERE = "here"
"""Devices of a job: the fleet's own."""
RECORDED = "recorded"
"""Workload of a job: the requests that the server answered last."""
MOST_REQUESTS = 20_000
"""Most requests of a simulated workload."""
MOST_SECONDS = 3600.0
"""Longest workload, in virtual time."""
MOST_DEVICES = 64
MEMORY_BYTES = 2 << 30
"""Most memory of the child beyond what it has at its start."""
RUN_SECONDS = 120
"""Most seconds, and processor seconds, of a run."""


Kind = Literal["simulate", "plan", "story"]


class SimulationJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. `fleet` and `specs` are those that are served, without faulty models and
    secrets."""

    kind: Kind
    fleet: FleetSettings
    specs: list[ModelSpec]
    costs: dict[str, StepCosts]
    """Costs of jobs on this machine by model, as learned while serving."""
    link_bytes_per_second: dict[str, float]
    """Rate at which weights have come to each device."""
    devices: str = HERE
    """`here`: the fleet's own; else as `ballast simulate --devices`."""
    presets: str | None = None
    workload: str = "bursty"
    """`recorded`: `requests`; else a generator's name."""
    requests: list[TracedRequest] = []
    rate: float | None = None
    """None: the recorded one; of a generator `here`, what devices can do; elsewhere its default."""
    seconds: float = 300.0
    seed: int = 0
    target: float = 0.99
    """Share of requests in their service levels, for a plan."""


class ProgressLine(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    what: str
    done: int
    of: int


class ResultLine(msgspec.Struct, frozen=True, tag_field="event", tag="result"):
    result: dict[str, Any]


class ErrorLine(msgspec.Struct, frozen=True, tag_field="event", tag="error"):
    message: str


Line = ProgressLine | ResultLine | ErrorLine
