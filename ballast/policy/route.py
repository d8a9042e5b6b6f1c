"""Which of the devices that serve a model gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def held_prefix(replicas: Sequence[Replica]) -> str:
    """Of the devices about as busy as the least busy, the one that holds most of the prompt.

    Of equals, that with the fewest open requests; of these the first.
    """
    most = min(r.open_requests for r in replicas) + SLACK
    near = [r for r in replicas if r.open_requests <= most]
    return min(near, key=lambda r: (-r.cached_tokens, r.open_requests)).device
