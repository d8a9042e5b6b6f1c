"""Where requests go, and what is known of the devices; so far, of the only one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ballast.core.errors import Unavailable
from ballast.core.event import Cancelled, Failed, Finished, Output
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.transport.messages import (
    DrainDevice,
    Drained,
    Outputs,
    Ready,
    Status,
    StopDevice,
    Submit,
    ToServer,
    ToWorker,
    Withdraw,
)

log = logging.getLogger(__name__)

WORKER_LOST = "worker_lost"
"""Code of `Failed` for requests whose worker died."""


class WorkerLink(Protocol):
    """A worker as its controller sees it; `ballast.cluster.local.LocalWorker` is one."""

    async def start(self, fleet: FleetSettings) -> Ready: ...

    def send(self, message: ToWorker) -> None: ...

    async def receive(self) -> ToServer | None: ...

    def epitaph(self) -> str: ...

    async def close(self, patience: float = 0.0) -> None: ...


class Outlet:
    """What is told to one client: the outputs of its requests, in order. One reader."""

    def __init__(self, controller: Controller, request_ids: Iterable[str]) -> None:
        self._controller = controller
        self.open = set(request_ids)
        """Requests that have not ended."""
        self._outputs: deque[Output] = deque()
        self._news = asyncio.Event()

    @property
    def more(self) -> bool:
        """Whether `take` will have something."""
        return bool(self.open or self._outputs)

    async def take(self) -> list[Output]:
        """The outputs there are; waits for one (for ever, where there is no `more`)."""
        await self._news.wait()
        self._news.clear()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def put(self, output: Output) -> None:
        """By the controller only."""
        self._outputs.append(output)
        self._news.set()

    def withdraw(self, request_id: str) -> None:
        """Want no more of one request; its memory is freed at the end of the step in flight."""
        if request_id in self.open:
            self._controller.withdraw([request_id])

    def close(self) -> None:
        """Want no more of any."""
        self._controller.withdraw(list(self.open))


class Controller:
    """Routes requests to the device, outputs to outlets, and keeps the device's last report."""

    def __init__(self, worker: WorkerLink) -> None:
        self._worker = worker
        self._outlets: dict[str, Outlet] = {}
        self._listener: asyncio.Task[None] | None = None
        self._ending = False
        self._drained = asyncio.Event()
        self.specs: Mapping[str, ModelSpec] = {}
        self.failed: Mapping[str, str] = {}
        """Models of the fleet that are not served, with the reason."""
        self.report: DeviceReport | None = None
        self.lost: str | None = None
        """Why there is no worker, if there is none."""

    async def start(self, fleet: FleetSettings) -> None:
        """Returns when the device serves. Raises Unavailable if it cannot."""
        ready = await self._worker.start(fleet)
        self.specs, self.failed, self.report = ready.specs, ready.failed, ready.report
        self._listener = asyncio.create_task(self._listen())

    @property
    def open_requests(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._outlets)

    def submit(self, submissions: Sequence[Submission]) -> Outlet:
        """Send requests, whose ids must be new, to their device.

        Raises Unavailable where there is no worker.
        """
        if self.lost is not None:
            raise Unavailable(self.lost)
        outlet = Outlet(self, (s.id for s in submissions))
        for submission in submissions:
            self._outlets[submission.id] = outlet
        self._worker.send(Submit(tuple(submissions)))
        return outlet

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Tell the device that nobody waits for these any more; what it still says is dropped."""
        known = [i for i in request_ids if i in self._outlets]
        for request_id in known:
            self._close(request_id)
        if known and self.lost is None:
            self._worker.send(Withdraw(tuple(known)))

    def fail_all(self, code: str, reason: str) -> None:
        """End every open request with an error, and tell the device so."""
        open_requests = dict(self._outlets)
        self.withdraw(list(open_requests))
        for request_id, outlet in open_requests.items():
            outlet.put(Failed(request_id, code, reason))

    async def close(self, patience: float) -> None:
        """End the worker: what is open is finished within `patience` seconds, or fails."""
        self._ending = True
        if self._listener is None:
            await self._worker.close()
            return
        if self.lost is None:
            self._worker.send(DrainDevice())
            await self._wait_until_drained(patience)
        if not self._drained.is_set() and self.lost is None:
            self._worker.send(StopDevice("the server is stopping"))
            await self._wait_until_drained(patience)
        self.fail_all("unavailable", "the server is stopping")
        self._listener.cancel()
        await asyncio.wait({self._listener})
        await self._worker.close(patience if self._drained.is_set() else 0.0)

    async def _wait_until_drained(self, seconds: float) -> None:
        drained = asyncio.ensure_future(self._drained.wait())
        assert self._listener is not None
        await asyncio.wait(
            {drained, self._listener}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        drained.cancel()

    async def _listen(self) -> None:
        try:
            while (message := await self._worker.receive()) is not None:
                self._handle(message)
            why = self._worker.epitaph()
        except Exception as error:  # whatever it is: no request may wait for ever
            log.exception("the worker cannot be understood")
            why = str(error)
        self._lose(f"the worker is gone ({why})")

    def _handle(self, message: ToServer) -> None:
        match message:
            case Outputs():
                for output in message.unwrap():
                    self._deliver(output)
            case Status():
                self.report = message.report
            case Drained():
                self._drained.set()
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _deliver(self, output: Output) -> None:
        outlet = self._outlets.get(output.request_id)
        if outlet is None:
            return  # withdrawn meanwhile
        if isinstance(output, Finished | Failed | Cancelled):
            self._close(output.request_id)
        outlet.put(output)

    def _close(self, request_id: str) -> None:
        outlet = self._outlets.pop(request_id)
        outlet.open.discard(request_id)

    def _lose(self, why: str) -> None:
        self.lost = why
        if not self._ending:
            log.error("%s; %d requests fail", why, self.open_requests)
        self.fail_all(WORKER_LOST, why)
