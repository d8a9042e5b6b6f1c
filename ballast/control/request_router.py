"""Route each request to a device of its model, and reroute it when that device's worker dies.

Used by the server's `Service` through the controller. Among several devices the fleet policy
chooses, by load, cached prefixes and residency of weights; the router keeps no queue of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from ballast.control.device_observer import DeviceObserver
from ballast.control.device_record import DeviceRecord
from ballast.control.open_request import OpenRequest, Outputs
from ballast.control.routed_devices import D, RoutedDevices
from ballast.core.errors import Unavailable
from ballast.core.request import Submission
from ballast.policy.fleet.replica_choice import Replica, for_decode, for_prefill

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Outputs)
Withdraw = Callable[[Sequence[str]], None]
"""Ends requests, by id."""
Pace = Callable[[Sequence[str], bool], None]
"""Pauses requests (True) or resumes them."""


class RequestRouter(DeviceObserver[D], Generic[D, S]):
    """Routes new requests to devices, and moves open ones from devices that die or are drained."""

    def __init__(
        self,
        devices: RoutedDevices[D],
        make_stream: Callable[[Sequence[str], Withdraw, Pace], S],
    ) -> None:
        """`make_stream`: makes the stream of some requests' outputs, by their ids."""
        self._devices, self._make_stream = devices, make_stream

    def submit(
        self,
        submissions: Sequence[Submission],
        key: str = "",
        activations_per_minute: int | None = None,
    ) -> S:
        """Route requests, whose ids must be new, to devices that serve their models; return the
        stream of their outputs. They wait while no worker serves.

        `key`: API key under which they have a fair share; empty: they are sent as they come.
        `activations_per_minute`: bound of the models that their key may have activated, by device.
        Raises Unavailable where all devices of a model are lost.
        """
        homes = [self._route(submission) for submission in submissions]
        stream = self._make_stream([s.id for s in submissions], self.withdraw, self.pace)
        for device in dict.fromkeys(homes):
            device.requests.add(
                OpenRequest(s, stream, key, activations_per_minute)
                for s, home in zip(submissions, homes, strict=True)
                if home is device
            )
        return stream

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Withdraw requests whose client has left; further outputs of them are dropped."""
        for device in self._devices.values():
            mine = [i for i in request_ids if i in device.requests]
            if mine:
                device.requests.withdraw(mine)

    def pace(self, request_ids: Sequence[str], paused: bool) -> None:
        """Pause requests whose client does not read, or resume them."""
        for device in self._devices.values():
            mine = [i for i in request_ids if i in device.requests]
            if mine:
                device.requests.set_paused(mine, paused)

    def fail_all(self, code: str, reason: str) -> None:
        """End every open request with an error."""
        for device in self._devices.values():
            device.requests.fail_all(code, reason)

    def _route(self, submission: Submission) -> D:
        homes = self._devices.routes(submission.model)
        if len(homes) == 1 and homes[0].lost is None:
            return homes[0]
        alive = [d for d in homes if d.lost is None]
        if not alive:
            raise Unavailable(f"{homes[0].lost}")
        ready = [d for d in alive if not d.requests.holding]
        # All wait: behind a request that runs alone, or, last of all, for a worker.
        return self.choose(submission, ready or [d for d in alive if d.down is None] or alive)

    def choose(self, submission: Submission, devices: Sequence[D]) -> D:
        """Choose the device of a request among several that accept it; note its prompt there."""
        replicas = for_prefill([_replica(d, submission) for d in devices])
        chosen = self._devices[self._devices.fleet_policy.route(replicas)]
        chosen.remember(submission)
        return chosen

    def choose_for_decode(self, submission: Submission, devices: Sequence[D]) -> D | None:
        """Choose the device that decodes a request after its first token, among `devices` of its
        model; None: none of them decodes."""
        replicas = for_decode([_replica(d, submission) for d in devices])
        return self._devices[self._devices.fleet_policy.decodes(replicas)] if replicas else None

    def hand_over(self, device: D) -> int:
        """Move the open requests of a device to others that serve its models, without their KV,
        which is recomputed (`Migrations` moves requests with it); return how many moved."""
        moved = 0
        for base in device.specs.values():
            others = self._devices.others(device, base.name)
            for request in device.requests.hand_over(base) if others else ():
                chosen = self.choose(request.submission, others)
                chosen.requests.add([request])
                moved += 1
        return moved

    def hand_over_unsent(self, device: D, model: str) -> int:
        """Move the requests of a model that leaves a device, and that its worker has not got, to
        others, also suspects: the worker takes them no more. Returns how many moved."""
        base = device.specs.get(model)
        if base is None:
            return 0
        able = [d for d in self._devices.values() if d is not device and d.lost is None]
        takers = [d for d in able if d.takes(model)]
        serving = [d for d in takers if d.down is None] or takers
        opened = (device.requests.get(i) for i in device.requests if serving)
        names = {served.name for served in base.served}
        unsent = [
            r.submission.id
            for r in opened
            if r is not None and not r.sent and r.submission.model in names
        ]
        for request in device.requests.remove(unsent):
            self.choose(request.submission, serving).requests.add([request])
        return len(unsent)

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        """Move the requests of a dead worker to other devices that serve their models, except those
        that may have caused its death."""
        moved = 0
        for request in device.requests.movable(in_flight):
            wanted = request.submission
            able = (d for d in self._devices.values() if d is not device and d.down is None)
            others = [d for d in able if d.takes(wanted.model)]
            if others:
                chosen = self.choose(wanted, others)
                chosen.requests.add(device.requests.remove([wanted.id]))
                moved += 1
        if moved:
            log.warning("%d requests of %s go on elsewhere", moved, device.name)


def _replica(d: DeviceRecord, submission: Submission) -> Replica:
    """Return the state of a device that the fleet policy sees for a request."""
    held, resident = d.held_tokens(submission), d.has_weights(submission.model)
    prompt, role, link = len(submission.prompt), d.fleet.device.role, d.link_use(submission)
    return Replica(d.name, len(d.requests), held, resident, role, prompt, link)
