"""Defects that this code once had, each put back: `benchmarks.fleet_faults --mutations` finds them.

A mutation replaces one method by what it was, or by what it would be without the rule that mended
it. The decision that describes the defect is named with each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from unittest.mock import patch

from ballast.control.leases import Leases
from ballast.control.migrations import Migrations
from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import OpenRequests
from ballast.control.orders import Orders
from ballast.control.spares import SpareInstruction, Spares
from ballast.core.command import Remove
from ballast.core.fleet_orders import LEAVING_SECONDS, FinishLeaving
from ballast.core.fleet_state import FleetDevice, FleetState
from ballast.core.migration import MigrationAnswer
from ballast.core.order import DONE, Fleet, SendCommand, Steps


@dataclass(frozen=True, slots=True)
class Mutation:
    """A defect, by the method that has it."""

    name: str
    decision: str
    owner: type
    method: str
    mutated: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Makes the method with the defect from the one without."""

    def put_back(self) -> Any:
        """Return a context manager in which the code has the defect."""
        real = getattr(self.owner, self.method)
        return patch.object(self.owner, self.method, self.mutated(real))


def _stale_answers(real: Callable[..., Any]) -> Callable[..., Any]:
    def answered(self: Migrations, device: str, answer: MigrationAnswer) -> None:
        found = self._migrations.get(answer.request_id)
        real(self, device, answer if found is None else replace(answer, attempt=found.attempt))

    return answered


def _tail_to_a_successor(real: Callable[..., Any]) -> Callable[..., Any]:
    def lose(self: Migrations, device: str) -> None:
        real(self, device)
        for migration in self._migrations.values():
            migration.kv_lost = False

    return lose


def _remove_in_silence(real: Callable[..., Any]) -> Callable[..., Any]:
    def remove(self: OpenRequests, request_ids: Iterable[str]) -> list[OpenRequest]:
        gone = [self._open.pop(i) for i in request_ids]
        for request in gone:
            request.cancel_expiry()
            self._drop_kv(request)
            self._silent[request.submission.model] -= not request.output_tokens
        return gone

    return remove


def _outputs_of_before(real: Callable[..., Any]) -> Callable[..., Any]:
    def end_at_worker(self: OpenRequests, sent: tuple[str, ...]) -> None:
        real(self, sent)
        self._withdrawn.clear()

    return end_at_worker


def _spared_borrower(real: Callable[..., Any]) -> Callable[..., Any]:
    def condemn(self: Leases, pair: Any, lender: str, borrower: str) -> None:
        pair.condemned = True

    return condemn


def _hasty_successor(real: Callable[..., Any]) -> Callable[..., Any]:
    def reap(self: Leases, device: str) -> None:
        real(self, device)
        for user in list(self._dead[device].users) if device in self._dead else ():
            self._release(device, user)

    return reap


def _last_home(real: Callable[..., Any]) -> Callable[..., Any]:
    def steps(self: FinishLeaving, fleet: Fleet, device: str | None = None) -> Steps:
        if fleet[self.device].still_serves(self.model):
            yield SendCommand(self.device, Remove(self.model, LEAVING_SECONDS))
        return DONE

    return steps


def _drained_takes(real: Callable[..., Any]) -> Callable[..., Any]:
    def others(self: FleetState[Any], device: FleetDevice, model: str) -> list[Any]:
        return [d for d in self.values() if d is not device]

    return others


def _kept_spare(real: Callable[..., Any]) -> Callable[..., Any]:
    def give_up(self: Spares, now: float, why: str) -> list[SpareInstruction]:
        self._active_at = inf
        return []

    return give_up


def _nothing(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: None


MUTATIONS = (
    Mutation("a late answer is taken for the next", "083", Migrations, "_answered", _stale_answers),
    Mutation("a successor gets the tail", "083", Migrations, "_lose", _tail_to_a_successor),
    Mutation(
        "a dead target gets the request",
        "083",
        Migrations,
        "_destination",
        lambda real: lambda self, source, target, submission: target,
    ),
    Mutation("those behind a suspect wait", "083", OpenRequests, "remove", _remove_in_silence),
    Mutation("imported KV is kept", "083", OpenRequests, "_drop_kv", _nothing),
    Mutation(
        "outputs of before it came back",
        "083",
        OpenRequests,
        "_end_at_worker",
        _outputs_of_before,
    ),
    Mutation("migrations of the dead go on", "083", Migrations, "_lose", _nothing),
    Mutation("requests go to the dead", "083", FleetState, "others", _drained_takes),
    Mutation("a late borrower is spared", "087", Leases, "_condemn", _spared_borrower),
    Mutation("a successor does not wait", "087", Leases, "_reap", _hasty_successor),
    Mutation("a spare that hangs is kept", "147", Spares, "_give_up", _kept_spare),
    Mutation("orders to the dead have no end", "104", Orders, "_lose", _nothing),
    Mutation("the last home is left", "104", FinishLeaving, "steps", _last_home),
)
