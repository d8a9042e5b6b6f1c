"""Which of the devices that serve a model gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """A device that serves the model, as it is when the request arrives."""

    device: str
    open_requests: int
    """Of all its models."""


Route = Callable[[Sequence[Replica]], str]


def least_open(replicas: Sequence[Replica]) -> str:
    """The device with the fewest open requests; of equals, the first."""
    return min(replicas, key=lambda r: r.open_requests).device
