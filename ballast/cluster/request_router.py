"""Which device gets a request, and who else has it when that device's worker dies."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ballast.cluster.device import RemoteDevice
from ballast.cluster.devices import Devices
from ballast.cluster.output_stream import OpenRequest, OutputStream
from ballast.core.errors import Unavailable
from ballast.core.request import Submission
from ballast.policy.fleet.replica_choice import Replica, for_decode, for_prefill

log = logging.getLogger(__name__)


class RequestRouter(Devices):
    """Requests go to devices, outputs to streams."""

    def submit(self, submissions: Sequence[Submission], key: str = "") -> OutputStream:
        """Send requests, whose ids must be new, to devices that serve their models, or keep them
        until there is one. Requests of several keys have fair shares; those of none are sent as
        they come.

        Raises Unavailable where none is to be expected.
        """
        homes = [self._route(submission) for submission in submissions]
        stream = OutputStream((s.id for s in submissions), self.withdraw, self.pace)
        for device in dict.fromkeys(homes):
            device.requests.take(
                OpenRequest(s, stream, key)
                for s, home in zip(submissions, homes, strict=True)
                if home is device
            )
        return stream

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Tell devices that nobody waits for these any more; what they still say is dropped."""
        for device in self.devices.values():
            mine = [i for i in request_ids if i in device.requests]
            if mine:
                device.requests.withdraw(mine)

    def pace(self, request_ids: Sequence[str], paused: bool) -> None:
        """Pause requests whose client does not read, or resume them."""
        for device in self.devices.values():
            mine = [i for i in request_ids if i in device.requests]
            if mine:
                device.requests.pace(mine, paused)

    def fail_all(self, code: str, reason: str) -> None:
        """End every open request with an error, and tell the devices so."""
        for device in self.devices.values():
            device.requests.fail_all(code, reason)

    def _route(self, submission: Submission) -> RemoteDevice:
        homes = self._serving(submission.model)
        if len(homes) == 1 and homes[0].lost is None:
            return homes[0]
        alive = [d for d in homes if d.lost is None]
        if not alive:
            raise Unavailable(f"{homes[0].lost}")
        return self._chosen(submission, [d for d in alive if not d.requests.holding] or alive)

    def _chosen(self, submission: Submission, devices: Sequence[RemoteDevice]) -> RemoteDevice:
        """Of devices that can take a request, the one that gets it: the model has several."""
        replicas = for_prefill([_replica(d, submission) for d in devices])
        chosen = self.devices[self.fleet_policy.route(replicas)]
        chosen.remember(submission)
        return chosen

    def _decoding(
        self, submission: Submission, devices: Sequence[RemoteDevice]
    ) -> RemoteDevice | None:
        """Of devices that serve its model, the one at which a request goes on that has its first
        token; None: none of them decodes."""
        replicas = for_decode([_replica(d, submission) for d in devices])
        return self.devices[self.fleet_policy.decodes(replicas)] if replicas else None

    def _hand_over(self, device: RemoteDevice) -> int:
        """Have others go on with what is open on a device, where they serve its models; how many
        requests that were. Their KV is computed anew: `Migrations` moves those that run with it."""
        moved = 0
        for base in device.specs.values():
            others = [d for d in self._serving(base.name) if d is not device and d.down is None]
            for request in device.requests.hand_over(base) if others else ():
                chosen = self._chosen(request.submission, others)
                chosen.requests.take([request])
                moved += 1
        return moved

    def _hand_on(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """A device's worker has died: others have its requests from now on, where they serve their
        models; not those that may have been the reason."""
        moved = 0
        for request in device.requests.movable(in_flight):
            wanted = request.submission
            able = (d for d in self.devices.values() if d is not device and d.down is None)
            others = [d for d in able if d.serves(wanted.model) and not d.cordoned]
            if others:
                chosen = self._chosen(wanted, others)
                chosen.requests.take(device.requests.let_go([wanted.id]))
                moved += 1
        if moved:
            log.warning("%d requests of %s go on elsewhere", moved, device.name)


def _replica(d: RemoteDevice, submission: Submission) -> Replica:
    """A device as it is for a request."""
    held, resident = d.held_tokens(submission), d.has_weights(submission.model)
    return Replica(d.name, len(d.requests), held, resident, d.fleet.device.role)
