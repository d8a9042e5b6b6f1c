"""Choose which of the devices that serve a model gets a request: load first, then cached prefix.

Used by the controller's request router and its counterpart in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.settings import Role

SLACK = 4
"""So many open requests more a device may have and still get one whose prefix it holds."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A device that serves the model, as it is when the request arrives."""

    device: str
    open_requests: int
    """Of all its models."""
    cached_tokens: int = 0
    """Of the request's prompt, those whose KV it holds."""
    resident: bool = True
    """The model's weights are there, as far as is known."""
    role: Role = Role.BOTH


def for_prefill(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Those that take new requests: all that do more than decode, if there are any."""
    return [r for r in replicas if r.role is not Role.DECODE] or replicas


def for_decode(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Those at which a request can go on that has its first token; none where all only prefill."""
    return [r for r in replicas if r.role is not Role.PREFILL]


def near(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Those about as busy as the least busy."""
    most = min(r.open_requests for r in replicas) + SLACK
    return [r for r in replicas if r.open_requests <= most]


def held_prefix(replicas: Sequence[Replica]) -> str:
    """Of the devices about as busy as the least busy, the one that holds most of the prompt.

    Of equals, that with the fewest open requests; of these the first.
    """
    return min(near(replicas), key=lambda r: (-r.cached_tokens, r.open_requests)).device
