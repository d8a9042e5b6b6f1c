"""Define what goes into the state machine of migrations and what comes out, and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.migration import MigrationAnswer, MigrationStep, Piece
from ballast.core.request import Submission


@dataclass(frozen=True, slots=True)
class MigrateEvent:
    """Migrate all running requests of a model off a device; `BatchEnded` follows.

    Each goes to a device that has the model's weights; where none has, it stays.
    """

    batch: int
    """Number of the order, unique; `BatchEnded` has it too."""
    source: str
    model: str
    bring: bool = False
    """Whether to activate the model elsewhere first, unless another device has its weights."""
    target: str | None = None
    """Where they go; None: where the fleet policy sends each."""


@dataclass(frozen=True, slots=True)
class BlockFilledEvent:
    """A request has its first token and a full block of KV on a device that only prefills."""

    source: str
    request_id: str


@dataclass(frozen=True, slots=True)
class AnsweredEvent:
    """A device has answered a step of a migration."""

    device: str
    answer: MigrationAnswer


@dataclass(frozen=True, slots=True)
class ActivationRefusedEvent:
    """A device has refused an `OrderActivation`."""

    device: str
    model: str


@dataclass(frozen=True, slots=True)
class DeviceLostEvent:
    """A device's worker has died, with all that it had."""

    device: str


@dataclass(frozen=True, slots=True)
class LookEvent:
    """Devices have reported, or time has passed `Migrations.due`."""


Event = (
    MigrateEvent
    | BlockFilledEvent
    | AnsweredEvent
    | ActivationRefusedEvent
    | DeviceLostEvent
    | LookEvent
)


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step of a migration to a device."""

    device: str
    step: MigrationStep


@dataclass(frozen=True, slots=True)
class OrderActivation:
    """Order a device to activate a model; a refusal comes back as `ActivationRefusedEvent`."""

    device: str
    model: str
    why: str


@dataclass(frozen=True, slots=True)
class MarkDeparting:
    """From now on the end of a request at its source is not its end."""

    source: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ContinueRequest:
    """Submit a request to its target, after the tokens that its client has."""

    request_id: str
    source: str
    target: str
    with_kv: bool
    """Whether all of its KV is there."""
    departed: bool
    """Whether it has ended at its source; False: the source has not answered, and is to end it."""


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """No request of a `MigrateEvent` will move any more."""

    batch: int
    left: int
    """Requests that have left the source."""


Instruction = SendStep | OrderActivation | MarkDeparting | ContinueRequest | BatchEnded


@dataclass(frozen=True, slots=True)
class OpenAtSource:
    """A request that is open at its source."""

    submission: Submission
    output: Sequence[int]
    """Tokens that its client has."""


class Devices(Protocol):
    """What migrations read of the devices and their requests, as of now."""

    def is_up(self, device: str) -> bool:
        """Return whether a worker serves."""

    def offer(self, source: str, target: str, pieces: Sequence[Piece]) -> str | None:
        """Have `target` read these pieces of the memory of `source`; return from where, as of
        `ImportKvEvent.source`. None: it would take too long."""

    def has_weights(self, device: str, model: str) -> bool:
        """Return whether a model's weights are on a device, by its last report."""

    def others(self, device: str, model: str) -> Sequence[str]:
        """Return the other devices to which requests of a model can be sent, those of the same host
        first: of equals the first one is chosen."""

    def leaves(self, device: str, model: str) -> bool:
        """Return whether a model leaves a device, or has left: its worker takes no requests."""

    def running(self, device: str, model: str) -> Sequence[str]:
        """Return the ids of a model's requests that a device runs."""

    def open_at(self, device: str, request_id: str) -> OpenAtSource | None:
        """Return a request; None: it has ended there."""

    def base_of(self, device: str, name: str) -> str | None:
        """Return the model that serves `name`, a model or adapter; None: unknown."""

    def choose(self, submission: Submission, devices: Sequence[str]) -> str:
        """Choose one of `devices` for a request, by the fleet policy."""

    def choose_for_decode(self, submission: Submission, devices: Sequence[str]) -> str | None:
        """Choose one of `devices` that decodes; None: none does."""
