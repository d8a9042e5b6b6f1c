"""Choose which of the devices that serve a model gets a request: load first, then cached prefix.

Used by the controller's request router and its counterpart in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.core.settings import Role

SLACK = 4
"""Open requests that a device may have beyond the least busy one and still get a request for its
cached prefix."""
WORTH = 0.5
"""Share of a prompt that a cached prefix has to cover for it to outweigh open requests. What all
prompts of a model begin with is no reason to crowd them on the devices that had the first."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a request's model, and others, read over the link of a device's host (C2CServe, 6.2)."""

    host: int | str
    """The host, whose devices share the link, by some number or name."""
    capacity: float
    """Bytes per second of the link."""
    model: str
    """The request's model."""
    demand: float
    """Bytes per second that it needs to keep its TPOT level there."""
    active: Mapping[str, float]
    """The same of models that have open requests on the device."""
    prefill_seconds: float
    """Of the request's prompt, on an idle device and link."""
    ttft: float
    """The model's TTFT level."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A device that serves the model, in its state when the request arrives."""

    device: str
    open_requests: int
    """Open requests of all its models."""
    cached_tokens: int = 0
    """Tokens of the request's prompt whose KV it holds."""
    resident: bool = True
    """Whether the model's weights are there, as far as is known."""
    role: Role = Role.BOTH
    prompt_tokens: int = 0
    """Tokens of the request's prompt; 0: unknown."""
    link: LinkUse | None = None
    """Use of the host's link by models that read weights in place; None: unknown."""

    @property
    def worth(self) -> int:
        """Cached tokens, if they are enough of the prompt; else 0."""
        return self.cached_tokens if self.cached_tokens >= WORTH * self.prompt_tokens else 0


def for_prefill(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas that take new requests: those that do more than decode, or all if there
    are none."""
    return [r for r in replicas if r.role is not Role.DECODE] or replicas


def for_decode(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas where a request can go on after its first token; none if all only
    prefill."""
    return [r for r in replicas if r.role is not Role.PREFILL]


def near(replicas: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas at most `SLACK` open requests busier than the least busy one."""
    most = min(r.open_requests for r in replicas) + SLACK
    return [r for r in replicas if r.open_requests <= most]


def held_prefix(replicas: Sequence[Replica]) -> str:
    """Return the device with the most cached tokens of the prompt, if these are `WORTH` of it, of
    those about as busy as the least busy.

    Of equals, the one with the fewest open requests; of these the one with the most cached tokens,
    and then the first.
    """
    return min(near(replicas), key=lambda r: (-r.worth, r.open_requests, -r.cached_tokens)).device
