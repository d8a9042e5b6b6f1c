"""Where requests go, and what is known of the devices; so far, of the only one.

A worker that dies is replaced, and the requests that it had go on in the next one after the tokens
that their clients have. Those that may have killed it twice run alone (`suspicion`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ballast.cluster.orders import PendingOrders, changed, names_of, refusal
from ballast.cluster.outlet import OpenRequest, Outlet
from ballast.cluster.spare import Spare
from ballast.cluster.suspicion import Suspicions
from ballast.core.command import Add, Order, Outcome, Remove
from ballast.core.errors import BallastError, BrokenPromise, Unavailable
from ballast.core.event import Cancelled, Failed, Finished, Output, TokenOut
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.transport.messages import (
    Done,
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
"""Code of `Failed` for requests whose worker died and could not be replaced."""
POISON = "poison"
"""Code of `Failed` for a request that killed workers, the last of them alone."""
LOST_AFTER = 3
"""Starts that fail one after another before requests fail instead of waiting."""
BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 60.0
DECISIONS_KEPT = 2000
STEADY_SECONDS = 60.0
"""A worker that lived so long died of something new: the next is started at once."""


class WorkerLink(Protocol):
    """A worker as its controller sees it; `ballast.cluster.local.LocalWorker` is one."""

    @property
    def waits(self) -> bool: ...

    async def prepare(self) -> None: ...

    async def start(self, fleet: FleetSettings) -> Ready: ...

    def send(self, message: ToWorker) -> None: ...

    async def receive(self) -> ToServer | None: ...

    def epitaph(self) -> str: ...

    def in_flight(self) -> frozenset[str]: ...

    async def close(self, patience: float = 0.0) -> None: ...


class Controller:
    """Routes requests to the device, outputs to outlets, and keeps the device's last report."""

    fleet: FleetSettings
    """What workers are started with; from `start` on. Whoever changes what is served keeps it."""

    def __init__(self, make_worker: Callable[[], WorkerLink]) -> None:
        self._make_worker = make_worker
        self.worker = make_worker()
        self._spare = Spare(make_worker)
        self._open: dict[str, OpenRequest] = {}
        """In order of arrival."""
        self._silent: Counter[str] = Counter()
        """Of them, by model, those without a token yet."""
        self._orders = PendingOrders(lambda command: self.worker.send(command))
        self._changing = asyncio.Lock()
        """Held while a model is added or removed: what follows is judged by what came of it."""
        self._suspicions = Suspicions()
        self._alone: str | None = None
        """The suspect that has the worker to itself."""
        self._supervisor: asyncio.Task[None] | None = None
        self._ending = False
        self._drained = asyncio.Event()
        self.specs: Mapping[str, ModelSpec] = {}
        self.unreadable: Mapping[str, str] = {}
        """Models whose tokenizer the server could not load, with the reason."""
        self._failed: Mapping[str, str] = {}
        self.report: DeviceReport | None = None
        self.decisions: deque[tuple[float, dict[str, Any]]] = deque(maxlen=DECISIONS_KEPT)
        """The last of all workers, oldest first: when, on the event loop's clock, and what."""
        self.restarts = 0
        """Workers that were started in place of one that died."""
        self.down: str | None = "the worker starts"
        """Why no worker serves, if none does."""
        self.lost: str | None = None
        """Why requests fail instead of waiting for a worker, if they do."""

    async def start(self, fleet: FleetSettings) -> None:
        """Returns when the device serves. Raises Unavailable if it cannot."""
        self.fleet = fleet
        self._serve(await self.worker.start(fleet))
        if fleet.server.spare_worker:
            await self._spare.hire()
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def failed(self) -> dict[str, str]:
        """Models of the fleet that are not served, with the reason."""
        return {**self.unreadable, **self._failed}

    @property
    def open_requests(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._open)

    def submit(self, submissions: Sequence[Submission]) -> Outlet:
        """Send requests, whose ids must be new, to their device, or keep them until there is one.

        Raises Unavailable where none is to be expected.
        """
        if self.lost is not None:
            raise Unavailable(self.lost)
        outlet = Outlet((s.id for s in submissions), self.withdraw)
        for submission in submissions:
            request = OpenRequest(submission, outlet)
            self._open[submission.id] = request
            self._silent[submission.model] += 1
            if self._holding:
                self._hold(request)
        self._dispatch()
        return outlet

    def full(self, base: ModelSpec) -> bool:
        """Whether the device would refuse another request of a model, as far as is known here.

        Refusing where one is read keeps what is too much away from the device. What the device
        reports is a tenth of a second old: the queue may have moved meanwhile.
        """
        silent = sum(self._silent[s.name] for s in base.served)
        if self.down is not None or not 0 < base.max_waiting <= silent:
            return False
        if silent >= base.max_waiting + base.max_running:
            return True
        models = () if self.report is None else self.report.models
        return any(m.name == base.name and m.waiting >= base.max_waiting for m in models)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Tell the device that nobody waits for these any more; what it still says is dropped."""
        ended = [self._close(i) for i in request_ids if i in self._open]
        sent = tuple(r.submission.id for r in ended if r.sent)
        if sent:
            self.worker.send(Withdraw(sent))
        self._dispatch()

    async def command(self, order: Order) -> Outcome:
        """Have the device carry out an operator's order; the next worker serves what came of it.

        Raises Unavailable where no worker serves, or it dies before it has answered: the next one
        then serves the fleet as it was.
        """
        if isinstance(order, Add | Remove):
            async with self._changing:
                return await self._command(order)
        return await self._command(order)

    async def _command(self, order: Order) -> Outcome:
        if self.down is not None:
            raise Unavailable(self.down)
        if self._ending:
            raise Unavailable("the server is stopping")
        refused = refusal(self.fleet, self.specs, order)
        if refused is not None:
            return Outcome("refused", refused)
        known = {m.name for m in self.fleet.models}
        if isinstance(order, Remove) and order.model in known.difference(self.specs):
            outcome = Outcome(specs=dict(self.specs))  # it could not be loaded
            self._carried_out(order, outcome)
            return outcome
        return await self._orders.send(order)

    def _carried_out(self, order: Order, outcome: Outcome) -> None:
        if outcome.code is not None:
            return
        self.specs = outcome.specs
        left = names_of(self.fleet)
        self.fleet = changed(self.fleet, order)
        left -= names_of(self.fleet)
        served = {s.name for base in self.specs.values() for s in base.served}
        failed = {**self._failed, **outcome.failed}
        self._failed = {n: why for n, why in failed.items() if n not in left | served}
        self.unreadable = {n: why for n, why in self.unreadable.items() if n not in left}

    def fail_all(self, code: str, reason: str) -> None:
        """End every open request with an error, and tell the device so."""
        ended = list(self._open.values())
        self.withdraw(list(self._open))
        for request in ended:
            request.outlet.put(Failed(request.submission.id, code, reason))

    async def close(self, patience: float) -> None:
        """End the worker: what is open is finished within `patience` seconds, or fails."""
        self._ending = True
        if self._supervisor is None:
            await self.worker.close()
            return
        if self.down is None:
            self.worker.send(DrainDevice())
            await self._wait_until_drained(patience)
        if self.down is None and not self._drained.is_set():
            self.worker.send(StopDevice("the server is stopping"))
            await self._wait_until_drained(patience)
        self.fail_all("unavailable", "the server is stopping")
        self._orders.fail("the server is stopping")
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        await self._spare.close()
        await self.worker.close(patience if self._drained.is_set() else 0.0)

    async def _wait_until_drained(self, seconds: float) -> None:
        drained = asyncio.ensure_future(self._drained.wait())
        assert self._supervisor is not None
        await asyncio.wait(
            {drained, self._supervisor}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        drained.cancel()

    # -- requests -------------------------------------------------------------------------------

    @property
    def _holding(self) -> bool:
        """Whether a new request has to wait here."""
        return self.down is not None or self._alone is not None

    def _hold(self, request: OpenRequest) -> None:
        """Accept a request that cannot be sent now, within its model's limit of waiting ones."""
        model = request.submission.model
        served = (s for base in self.specs.values() for s in base.served)
        held = sum(r.fresh and r.submission.model == model for r in self._open.values())
        most = next((s.max_waiting for s in served if s.name == model), held)
        if held > most:
            self._fail(request, "queue_full", f"{most} requests of {model!r} wait already")
        request.accepted = True

    def _dispatch(self) -> None:
        """Send what may be sent: one suspect alone, or else everything."""
        if self.down is not None or self._ending:
            return
        if self._alone is not None and self._alone in self._open:
            return
        waiting = [r for r in self._open.values() if not r.sent]
        suspects = [r for r in waiting if self._suspicions.suspect(r.submission.id)]
        self._alone = None
        if suspects:  # the likeliest culprit came last
            waiting = suspects[-1:]
            self._alone = waiting[0].submission.id
            log.warning("%s runs alone: it was in flight at two crashes", self._alone)
        if waiting:
            self.worker.send(Submit(tuple(r.to_send() for r in waiting)))

    def _deliver(self, output: Output) -> None:
        request = self._open.get(output.request_id)
        if request is None:
            return  # withdrawn meanwhile
        try:
            news = request.news(output)
        except BrokenPromise as error:
            log.error("%s", error)
            self.withdraw([output.request_id])
            request.outlet.put(Failed(output.request_id, "internal_error", str(error)))
            return
        if news is None:
            return
        if len(request.told) == 1 and isinstance(news, TokenOut):
            self._silent[request.submission.model] -= 1
        if isinstance(output, Finished | Failed | Cancelled):
            self._close(output.request_id)
        request.outlet.put(news)

    def _fail(self, request: OpenRequest, code: str, reason: str) -> None:
        """A request that no worker has ends with an error."""
        self._close(request.submission.id)
        request.outlet.put(Failed(request.submission.id, code, reason))

    def _close(self, request_id: str) -> OpenRequest:
        request = self._open.pop(request_id)
        if not request.told:
            self._silent[request.submission.model] -= 1
        request.outlet.open.discard(request_id)
        self._suspicions.forget(request_id)
        return request

    # -- workers --------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Listens to the worker; replaces it when it dies."""
        clock = asyncio.get_running_loop().time
        failures = 0
        try:
            while True:
                began = clock()
                why = await self._listen()
                had_work = any(r.sent for r in self._open.values())
                self._mourn(why)
                if self._ending:
                    return
                # Requests can kill only so many workers each; whatever else does may go on.
                fresh = had_work or clock() - began > STEADY_SECONDS
                failures = 0 if fresh else failures + 1
                await self._replace(failures)
        except Exception as error:  # whatever it is: no request may wait for ever
            log.exception("workers cannot be supervised")
            self.down = self.lost = f"{type(error).__name__}: {error}"
            self.fail_all(WORKER_LOST, self.lost)
            self._orders.fail(self.lost)

    async def _listen(self) -> str:
        """Handle what the worker says until it has ended; how it did."""
        try:
            while (message := await self.worker.receive()) is not None:
                self._handle(message)
        except BallastError as error:
            log.error("the worker cannot be understood: %s", error)
            return str(error)
        return self.worker.epitaph()

    def _handle(self, message: ToServer) -> None:
        match message:
            case Outputs():
                for output in message.unwrap():
                    self._deliver(output)
                self._dispatch()
            case Status():
                self.report = message.report
                self._remember(message)
            case Done():
                order = self._orders.done(message)
                if order is not None:
                    self._carried_out(order, message.outcome)
            case Drained():
                self._drained.set()
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _remember(self, status: Status) -> None:
        """Decisions outlive the worker, and with it the clock that they were dated by."""
        since = asyncio.get_running_loop().time() - status.report.now
        for decision in status.decisions:
            what = {key: value for key, value in decision.items() if key != "at"}
            self.decisions.append((since + decision["at"], what))

    def _serve(self, ready: Ready) -> None:
        self.specs, self._failed, self.report = ready.specs, ready.failed, ready.report
        self.down = self.lost = None
        self._drained.clear()
        self._dispatch()

    def _mourn(self, why: str) -> None:
        """The worker has died: its requests wait for the next, and those in flight are noted."""
        self.down = f"the worker is gone ({why})"
        self._orders.fail(self.down)
        sent = [r.submission.id for r in self._open.values() if r.sent]
        if not self._ending:
            log.error("%s; %d requests wait for the next", self.down, len(sent))
        recorded = self.worker.in_flight()
        in_flight = [i for i in recorded or sent if i in self._open]
        for request in self._open.values():
            request.sent = False
        self._judge(in_flight)

    def _judge(self, in_flight: Sequence[str]) -> None:
        """Remember who was in flight; one that was alone has done it."""
        alone, self._alone = self._alone, None
        self._suspicions.crashed(in_flight)
        if alone is None or alone not in in_flight:
            return
        log.error("%s kills workers; it fails", alone)
        self._suspicions.convict(alone)
        reason = "the worker died whenever this request ran, the last time with nothing beside it"
        self._fail(self._open[alone], POISON, reason)

    async def _replace(self, failures: int) -> None:
        """Start a worker, again and again until one serves."""
        attempts = 0
        while True:
            if failures + attempts > 0:
                seconds = BACKOFF_SECONDS * 2 ** min(failures + attempts - 1, 10)
                await asyncio.sleep(min(LONGEST_BACKOFF_SECONDS, seconds))
            try:
                await self.worker.close()
                self.worker = await self._spare.take() or self._make_worker()
                ready = await self.worker.start(self.fleet)
            except (BallastError, OSError) as error:
                attempts += 1
                self.down = str(error)
                log.error("a worker could not be started: %s", error)
                if attempts >= LOST_AFTER:
                    self.lost = self.down
                    self.fail_all(WORKER_LOST, self.lost)
                continue
            self.restarts += 1
            log.warning("a new worker serves; %d requests go on", self.open_requests)
            self._serve(ready)
            if self.fleet.server.spare_worker:
                await self._spare.hire()
            return
