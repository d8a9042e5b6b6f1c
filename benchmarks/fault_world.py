"""A fleet in virtual time whose workers, messages and clients misbehave by a seed.

The controller is the real one (`ballast.control`). Workers are small: they keep requests and KV as
the engine does, and a token is a digest of the KV before it, so KV that is lost, repeated or put in
a wrong place changes the answer. A connection keeps the order of its messages; each takes a random
time; a worker that dies takes its messages in both directions with it. A server that ends takes all
that it knew with it; its workers end when they notice.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from ballast.control.device_leases import DeviceLeases
from ballast.control.device_record import DeviceRecord
from ballast.control.migrations import ANSWER_SECONDS
from ballast.control.open_request import OpenRequest
from ballast.control.request_migrations import RequestMigrations
from ballast.control.request_router import Pace, RequestRouter, Withdraw
from ballast.control.routed_devices import RoutedDevices
from ballast.control.suspicion import Suspicions
from ballast.core.actions import ActivateCommand, EvictCommand, Lend, Recall
from ballast.core.command import Add, Remove
from ballast.core.errors import Unavailable
from ballast.core.event import (
    CancelledOutput,
    FailedOutput,
    FinishedOutput,
    Output,
    TokenOutput,
)
from ballast.core.fleet_state import OPERATOR, Command, CommandOutcome
from ballast.core.lease import LendingMessage
from ballast.core.migration import (
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvTailEvent,
    MigrationAnswer,
    MigrationStep,
)
from ballast.core.model import ModelSpec
from ballast.core.order import MoveRequests
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Role
from ballast.core.view import Residency
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    lending_message,
)
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)
from benchmarks.fault_lending import N_PAGES, WorkerMemory, check_pages, still_maps
from benchmarks.fault_orders import FaultOrders, RandomMoves, drawn_order
from benchmarks.fault_spares import FaultSpares

SPITEFUL = 4
"""Every so many worlds there is one in which faults strike in the midst of migrations."""
RESTARTING = 10
"""Every so many worlds there is one whose server ends, and another begins."""
ORPHANED_SECONDS = 2.5
"""Time within which workers notice that their server has ended."""
VOCAB = 1000
BLOCK = 4
"""Tokens of a block of KV."""
REPORT_SECONDS = 0.1
SILENT_SECONDS = 20.0
"""Time after which a worker that says nothing is killed, as by the server's `silent_seconds`."""
HORIZON = 1500.0
"""Virtual seconds after which a request that is still open counts as lost: all of a world's, if
each is a suspect and runs alone, take less than 900."""


def next_token(model: str, tokens: Sequence[int]) -> int:
    """Return the token that a model gives after `tokens`."""
    return zlib.crc32(f"{model}{list(tokens)}".encode()) % VOCAB


def undisturbed(submission: Submission) -> list[int]:
    """Return the answer of a worker that nothing happens to."""
    tokens = list(submission.prompt)
    for _ in range(submission.max_tokens):
        tokens.append(next_token(submission.model, tokens))
    return tokens[len(submission.prompt) :]


def _is_over(client: Client) -> bool:
    """Return whether nothing more is owed to a client."""
    return bool(client.ends) or client.left or client.cut


class VirtualTimers:
    """Implements `ballast.control.timers.Timers`; also the agenda of all that happens."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Call]] = []
        self._sequence = itertools.count()
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def call_later(self, seconds: float, call: Callable[[], object]) -> _Call:
        return self.call_at(self._now + max(0.0, seconds), call)

    def call_at(self, at: float, call: Callable[[], object]) -> _Call:
        """Call `call` at `at`; of equal times the one that was scheduled first comes first."""
        entry = _Call(call)
        heapq.heappush(self._heap, (at, next(self._sequence), entry))
        return entry

    def keep_lasting(self) -> None:
        """Forget all calls but those of `LastingTimers`."""
        self._heap = [entry for entry in self._heap if entry[2].lasting]
        heapq.heapify(self._heap)

    def step(self) -> bool:
        """Make the next call; return False if there is none."""
        while self._heap:
            self._now, _, entry = heapq.heappop(self._heap)
            if entry.call is not None:
                entry.call()
                return True
        return False


@dataclass(slots=True)
class _Call:
    call: Callable[[], object] | None
    lasting: bool = False
    """Whether it is made though all but the spare worker is over."""

    def cancel(self) -> None:
        self.call = None


@dataclass(frozen=True)
class LastingTimers:
    """Implements `ballast.control.timers.Timers`, for what goes on after all else."""

    timers: VirtualTimers

    def now(self) -> float:
        return self.timers.now()

    def call_later(self, seconds: float, call: Callable[[], object]) -> _Call:
        made = self.timers.call_later(seconds, call)
        made.lasting = True
        return made


@dataclass
class Client:
    """Implements `Outputs` for one request; keeps what was delivered."""

    submission: Submission
    withdraw: Withdraw
    pace: Pace
    open: set[str] = field(default_factory=set)
    paused: bool = False
    tokens: list[int] = field(default_factory=list)
    ends: list[Output] = field(default_factory=list)
    gaps: int = 0
    """Tokens that did not come in their order, or after the end."""
    left: bool = False
    cut: bool = False
    """Whether its connection went with a server that ended."""

    def put(self, output: Output) -> None:
        if self.cut:
            return
        if isinstance(output, TokenOutput):
            self.gaps += output.index != len(self.tokens) or bool(self.ends)
            self.tokens.append(output.token)
        else:
            self.ends.append(output)


@dataclass
class Running:
    """A request at a worker. `kv`: the token that each position's KV was computed from."""

    submission: Submission
    tokens: list[int]
    kv: list[int]
    paused: bool = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.submission.prompt)


@dataclass
class Worker:
    """The process of one device: what it holds dies with it."""

    resident: set[str]
    memory: WorkerMemory
    requests: dict[str, Running] = field(default_factory=dict)
    exported: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By request: (tokens, attempt)."""
    departing: dict[str, int] = field(default_factory=dict)
    imported: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    """By request: (KV, attempt)."""
    served: set[str] = field(default_factory=set)
    going: dict[str, Callable[[CommandOutcome], None]] = field(default_factory=dict)
    """Models that are removed when their requests have ended, each with what to call then."""
    alive: bool = True
    hung: bool = False
    """Whether it does nothing any more, and answers nothing; its socket is open."""
    importing: dict[str, int] = field(default_factory=dict)
    """By request whose KV is on its way: attempt."""

    def end(self) -> None:
        self.alive = False


class FaultDevice(DeviceRecord):
    """The controller's record of a device, joined to the world's present worker of it."""

    def __init__(self, world: FaultWorld, name: str, role: Role, models: Sequence[str]):
        super().__init__(name, world.suspicions, world.timers)
        settings = DeviceSettings(name=name, budget_bytes=1 << 30, role=role)
        self.fleet = FleetSettings(models=_settings(models), device=settings)
        self.world = world
        self.process = world.new_worker(name, set())
        self.kept: set[str] = set()
        """Requests that it had when its worker died, or that have been counted since."""
        self.cut = False
        """Whether the server that this is a record of has ended."""

    def tell(self, message: ToWorker) -> None:
        self.world.to_worker(self, partial(self.world.handle, self, message))

    def order(
        self,
        command: Command,
        answered: Callable[[CommandOutcome], object],
        by: str = OPERATOR,
    ) -> None:
        if self.down is not None:
            answered(CommandOutcome("unavailable", self.down))
        self.world.to_worker(self, partial(self.world.carry_out, self, command, answered))

    def kill(self, why: str) -> None:
        if self.cut:
            return
        self.world.kills += 1
        self.world.die(self)

    def _began(self, request_id: str) -> None:
        self.world.migrations.first_token(self, request_id)


class FaultWorld:
    """A controller, its devices, and clients, of which a seed decides what happens."""

    def __init__(self, seed: int, n_devices: int, n_requests: int) -> None:
        self.random = rng = random.Random(seed)
        self.timers = VirtualTimers()
        self._lends = lends = rng.random() < 0.7
        self._begin()
        self.reserve = FaultSpares(LastingTimers(self.timers), random.Random(-seed - 3))
        self.reserve.want()
        self.away = False
        """Whether the server has ended, and its successor has not begun."""
        self.servers = 1
        """Servers that have begun."""
        self._asking = n_requests
        """Requests that are yet to come, or to come again."""
        self._homes: list[tuple[str, Role, list[str]]] = []
        """The devices of the fleet file, with their models."""
        self.spite = random.Random(-seed - 2) if seed % SPITEFUL == SPITEFUL - 1 else None
        """Draws what goes wrong in the midst of migrations; None: nothing does on purpose."""
        self._struck: set[tuple[str, type[MigrationStep]]] = set()
        """Requests, and steps of their migrations, in which something has gone wrong on purpose."""
        self._targets: dict[str, FaultDevice] = {}
        """By request, the device that has imported its KV last."""
        self.stray = 0
        self._memories: dict[str, WorkerMemory] = {}
        self.kills = 0
        """Workers that were killed for keeping pages."""
        self.lent = 0
        """Pages that were lent by orders."""
        self.twice = self.overdue = 0
        self._coming: list[Submission] = []
        self.clients: list[Client] = []
        self._last: dict[tuple[str, bool], float] = {}
        """When the last message of each connection arrives."""
        self.deaths = 0
        self._orders: dict[int, None] = {}
        """Orders that have not ended."""
        self._order_numbers = itertools.count()
        self.ordered = 0
        self.step_seconds = 1.0 if self.spite else rng.choice([0.1, 1.0])
        """The longest step of a worker: in slow worlds requests outlive answers that are late."""
        self.refused = 0
        """Requests that the controller did not take: no device was left."""
        split = rng.random() < 0.4
        self.models = models = [f"m{i}" for i in range(rng.randrange(1, 4))]
        for i in range(n_devices):
            role = Role.BOTH
            if split:
                role = Role.PREFILL if i == 0 else rng.choice([Role.DECODE, Role.BOTH])
            served = [m for m in models if i == 0 or rng.random() < 0.8]
            self._homes.append((f"d{i}", role, served))
            self._add_device(*self._homes[-1])
        for i in range(n_requests):
            self.timers.call_later(rng.uniform(0, 4), partial(self._arrive, i, rng.choice(models)))
        for _ in range(rng.randrange(0, 6)):
            self.timers.call_later(rng.uniform(0, 6), self._die)
        # In restless worlds requests are moved again before late answers to the first time come.
        restless = rng.random() < 0.1
        lasting = 20.0 if restless else 6.0
        for _ in range(rng.randrange(15, 40) if restless else rng.randrange(0, 5)):
            self.timers.call_later(rng.uniform(0, lasting), self._migrate)
        for _ in range(rng.randrange(2, 6) if restless else rng.randrange(0, 3)):
            self.timers.call_later(rng.uniform(0, lasting / 2), self._stall)
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.timers.call_later(rng.uniform(0, 6), self._hang)
        if self.spite is not None:
            for _ in range(30):
                self.timers.call_later(self.spite.uniform(0, 20.0), self._migrate)
        for _ in range(rng.randrange(0, 12) if lends else 0):
            self.timers.call_later(rng.uniform(0, 6), self._order_lending)
        for _ in range(rng.choice([0, 0, 3, 6])):
            self.timers.call_later(rng.uniform(0, 6), self._order)
        self._has_policy = rng.random() < 0.3
        if self._has_policy:
            self._follow_policy(rng)
        self._ends = random.Random(-seed - 4) if seed % RESTARTING == 0 else None
        """Draws when the server ends and how; None: it does not."""
        if self._ends is not None:
            for at in range(self._ends.randrange(1, 3)):
                self.timers.call_later(self._ends.uniform(3 * at, 3 * at + 3), self._end)

    def _begin(self) -> None:
        """Let a server begin, which knows of no request and of no worker."""
        self.suspicions = Suspicions()
        self.devices: RoutedDevices[FaultDevice] = RoutedDevices()
        self.devices.fleet_policy = FixedPlacement()
        self.router: RequestRouter[FaultDevice, Client] = RequestRouter(
            self.devices, self._make_client
        )
        self.migrations = RequestMigrations(self.devices, self.router, self.timers)
        self.leases: DeviceLeases[FaultDevice] = DeviceLeases(
            self.devices, lambda a, b: None if self._lends else "it cannot", self.timers
        )
        self.commands: FaultOrders[FaultDevice, Client] = FaultOrders(
            self.devices, self.router, self.migrations, self.leases, self.timers
        )

    def _add_device(self, name: str, role: Role, served: Sequence[str]) -> None:
        settings = DeviceSettings(name="d0", budget_bytes=1 << 30)
        self.devices.fleet = FleetSettings(models=_settings(self.models), device=settings)
        device = FaultDevice(self, name, role, served)
        self.devices.add(device)
        self._start(device)

    def run(self) -> None:
        """Run until every request has ended, or HORIZON has passed."""
        while self.timers.now() < HORIZON and self.timers.step():
            self.validate()
            over = self.timers.now() > 7 and not (self.away or self._asking)
            over = over and all(map(_is_over, self.clients))
            quiet = not self._orders and not self.migrations.busy
            quiet = quiet and not self.commands.busy
            if over and quiet and all(d.down is None for d in self._all):
                break
        while self.timers.now() < HORIZON and self._holding and self.timers.step():
            pass
        self.timers.keep_lasting()  # all is over but for the spare worker
        while self.timers.now() < HORIZON and not self.reserve.ready and self.timers.step():
            pass

    def validate(self) -> None:
        """Assert that no request is open at two devices, and count pages that are not their
        owner's alone."""
        held: list[dict[str, OpenRequest]] = []
        changed = False
        for device in self.devices.values():
            if device.requests._open:
                held.append(device.requests._open)
            if device.down is not None:
                self._check_new(device)
            changed = changed or device.process.memory.changed
        if len(held) > 1 and len(set().union(*held)) < sum(map(len, held)):
            doubled = [i for i, n in Counter(itertools.chain(*held)).items() if n > 1]
            raise AssertionError(f"{doubled} are open at two devices")
        if changed:
            workers = self._workers
            twice, _, late = check_pages(workers, self.timers.now())
            self.twice += twice
            self.overdue += late
            for worker in workers.values():
                worker.memory.changed = False

    def _check_new(self, device: FaultDevice) -> None:
        """Count requests that were given to a device without a worker while others serve them."""
        new = [i for i in device.requests if i not in device.kept]
        device.kept.update(new)
        for i in new:
            request = device.requests.get(i)
            assert request is not None
            able = self.devices.others(device, request.submission.model)
            self.stray += any(d.takes(request.submission.model) for d in able)

    # -- what came of it --------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """Accepted requests without an end."""
        return sum(not _is_over(c) for c in self.clients)

    @property
    def repeated(self) -> int:
        """Tokens out of order or after an end, and further ends."""
        return sum(c.gaps + max(0, len(c.ends) - 1) for c in self.clients)

    @property
    def changed(self) -> int:
        """Answers that differ from an undisturbed run's, as far as they go; and failures that no
        worker's death accounts for."""
        wrong = 0
        for c in self.clients:
            expected = undisturbed(c.submission)
            done = any(isinstance(end, FinishedOutput) for end in c.ends)
            wrong += c.tokens != (expected if done else expected[: len(c.tokens)])
            for end in c.ends:
                poison = isinstance(end, FailedOutput) and end.code == "poison"
                wrong += not done and not (poison and self.deaths >= 3)
        return wrong

    @property
    def leaked(self) -> int:
        """Requests and imported KV that live workers keep though the controller knows of none,
        orders without an end, and pages that nobody has."""
        _, without, _ = check_pages(self._workers, self.timers.now())
        return (
            without
            + sum(
                len(d.process.imported)
                + len(d.process.departing)
                + sum(i not in d.requests for i in d.process.requests)
                for d in self._all
            )
            + len(self._orders)
        )

    @property
    def homeless(self) -> int:
        """Models that no device will serve which takes requests."""
        able = [d for d in self._all if not d.cordoned]
        homes = [{m.name for m in d.fleet.models} - d.leaving for d in able]
        return sum(not any(model in on for on in homes) for model in self.models)

    @property
    def spares(self) -> int:
        """Spares that were taken though they had ended, and whether in the end none waits, and none
        is to come."""
        return self.reserve.wrong + (not self.reserve.coming)

    @property
    def _workers(self) -> dict[str, Worker]:
        return {name: device.process for name, device in self.devices.items()}

    @property
    def _all(self) -> list[FaultDevice]:
        return list(self.devices.values())

    @property
    def _holding(self) -> bool:
        """Whether messages that would end something may still be on their way."""
        return self.leaked > 0

    # -- messages ---------------------------------------------------------------------------------

    def to_worker(self, device: FaultDevice, deliver: Callable[[], None]) -> None:
        self._send(device, deliver, up=False)

    def _send(self, device: FaultDevice, deliver: Callable[[], object], *, up: bool) -> None:
        """Deliver a message after a random time, in the order of its connection, unless the worker
        has died meanwhile."""
        process = device.process
        slow = 2.0 if self.random.random() < 0.01 else 0.02
        key = device.name, up
        soon = self.timers.now() + self.random.uniform(0, slow)
        at = max(self._last.get(key, 0.0), soon)
        self._last[key] = at

        def arrive() -> None:
            here = process is device.process and process.alive and not device.cut
            if here and (up or not process.hung):
                deliver()

        self.timers.call_at(at, arrive)

    # -- clients ----------------------------------------------------------------------------------

    def _make_client(self, ids: Sequence[str], withdraw: Withdraw, pace: Pace) -> Client:
        (submission,) = self._coming
        return Client(submission, withdraw, pace, set(ids))

    def _arrive(self, i: int, model: str) -> None:
        rng = self.random
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))
        most = rng.randrange(1, 25 if self.spite is None else 60)
        self._submit(Submission(id=f"r{i}", model=model, prompt=prompt, max_tokens=most))

    def _submit(self, submission: Submission) -> None:
        rng = self.random
        if self.away:  # the connection is refused
            self.timers.call_later(0.5, partial(self._submit, submission))
            return
        self._asking -= 1
        self._coming = [submission]
        try:
            client = self.router.submit([submission])
        except Unavailable:
            self.refused += 1
            return
        self.clients.append(client)
        if rng.random() < 0.1:
            self.timers.call_later(rng.uniform(0, 2), partial(self._leave, client))
        if rng.random() < 0.1:
            begins = rng.uniform(0, 2)
            self.timers.call_later(begins, partial(self._pace, client, True))
            self.timers.call_later(begins + rng.uniform(0, 1), partial(self._pace, client, False))

    @staticmethod
    def _leave(client: Client) -> None:
        if not client.ends and not client.cut:
            client.left = True
            client.withdraw([client.submission.id])

    @staticmethod
    def _pace(client: Client, paused: bool) -> None:
        if client.cut:
            return
        client.paused = paused
        client.pace([client.submission.id], paused)

    # -- what goes wrong, and what operators order ------------------------------------------------

    def _die(self) -> None:
        self.die(self.random.choice(self._all))

    def die(self, device: FaultDevice) -> None:
        """Let the worker of a device die, unless it is dead."""
        process = device.process
        if not process.alive or device.down is not None:
            return
        process.alive = False
        self.deaths += 1
        recorded = list(process.requests) if self.random.random() < 0.5 else []
        noticed = partial(self._notice, device, recorded)
        self.timers.call_later(self.random.uniform(0, 0.2), noticed)

    def _hang(self) -> None:
        """Let a worker do and answer nothing any more, until it is killed for its silence."""
        device = self.random.choice(self._all)
        process = device.process
        process.hung = True

        def silent() -> None:
            if process is device.process:
                self.die(device)

        self.timers.call_later(SILENT_SECONDS, silent)

    def _end(self) -> None:
        """Let the server end, and another begin some time later.

        What it knew is gone. Workers go on until they notice, as those of other hosts do for
        seconds, but nobody hears them. Clients ask again.
        """
        rng, old = self._ends, self._all
        if rng is None or self.away:
            return
        self.away = True
        self._orders.clear()
        for device in old:
            device.cut = True
            self.timers.call_later(rng.uniform(0.0, ORPHANED_SECONDS), device.process.end)
        away = rng.uniform(0.2, ORPHANED_SECONDS + 1)
        for client in self.clients:
            if not _is_over(client):
                client.cut = True
                same = replace(client.submission, id=f"{client.submission.id}+")
                asks_again = away + rng.uniform(0, 2)
                self._asking += 1
                self.timers.call_later(asks_again, partial(self._submit, same))
        self.timers.call_later(away, self._begin_again)

    def _begin_again(self) -> None:
        """Let the next server begin, with the fleet file and workers of its own."""
        self.away = False
        self.servers += 1
        self._begin()
        self._last.clear()
        for home in self._homes:
            self._add_device(*home)
        if self._has_policy and self._ends is not None:
            self._follow_policy(self._ends)

    def _follow_policy(self, rng: random.Random) -> None:
        self.devices.fleet_policy = RandomMoves(random.Random(rng.random()), self.models)
        self.commands.follow_policy()

    def _notice(self, device: FaultDevice, recorded: Collection[str]) -> None:
        if device.cut:
            return
        in_flight = device.worker_gone("killed", recorded)
        self.leases.worker_died(device, in_flight)
        self.migrations.worker_died(device, in_flight)
        self.router.worker_died(device, in_flight)
        self.commands.worker_died(device, in_flight)
        device.kept = set(device.requests)
        replaced = partial(self._replace, device, device.process.memory)
        reaped = partial(self.leases.reaped, device, replaced)
        self.timers.call_later(self.random.uniform(0.0, 0.1), reaped)

    def _replace(self, device: FaultDevice, memory: WorkerMemory) -> None:
        """Start a worker in place of one whose memory nobody maps any more."""
        if device.cut:
            return
        self.twice += still_maps(self._workers, memory)
        self.reserve.take()
        self.timers.call_later(self.random.uniform(0.05, 2.0), partial(self._start, device))

    def new_worker(self, name: str, resident: set[str]) -> Worker:
        """Return the process of a device's next worker."""
        rng = random.Random(self.random.random())
        stuck, address = rng.random() < 0.2, f"{name}-{len(self._memories)}"
        clock = rng.uniform(-1000, 1000), rng.uniform(0.99, 1.01)
        memory = WorkerMemory(name, address, rng, self._memories, stuck, *clock)
        return Worker(resident, memory)

    def _start(self, device: FaultDevice) -> None:
        if device.cut:
            return
        served = [m.name for m in device.fleet.models]
        resident = {m for m in served if self.random.random() < 0.5}
        device.process = process = self.new_worker(device.name, resident)
        process.served.update(served)
        process.memory.connect(partial(self._tell_of_lending, device))
        address = process.memory.address
        specs = {m: _spec(m) for m in served}
        device.worker_serves(ReadyMsg(specs, {}, self._report(device), address))
        self.leases.worker_ready(device)
        self.reserve.want()
        self._report_later(device, device.process)
        self._compute_later(device, device.process)

    def _migrate(self, device: FaultDevice | None = None, model: str | None = None) -> None:
        if self.away:
            return
        device = device or self.random.choice(self._all)
        number = self._new_order()

        def ended(left: int) -> None:
            self._orders.pop(number, None)

        model = model or self.random.choice(sorted(device.specs) or ["m0"])
        step = MoveRequests(device.name, model, bring=self.random.random() < 0.5)
        self.migrations.move_requests(step, ended)

    def _order_lending(self) -> None:
        """Have a device lend to another, or recall what it has lent."""
        rng = self.random
        if len(self._all) < 2 or self.away:
            return
        lender, borrower = rng.sample(self._all, 2)
        command: Lend | Recall = Lend(borrower.name, rng.randrange(1, 12))
        standing = [(v.lender, v.borrower) for v in self.leases.pairs.standing]
        if standing and rng.random() < 0.5:
            name, to = rng.choice(standing)
            lender, command = self.devices[name], Recall(to, None, rng.uniform(0.0, 4.0))
        number = self._new_order()

        def ended(outcome: CommandOutcome) -> None:
            self._orders.pop(number, None)
            self.lent += isinstance(command, Lend) and outcome.code is None and command.pages

        self.leases.order(lender.name, command, ended, by_operator=rng.random() < 0.2)

    def _order(self) -> None:
        """Let an operator order something about models or devices."""
        if self.away:
            return
        order, only = drawn_order(self.random, self.models, list(self.devices))
        number = self._new_order()

        def ended(outcome: CommandOutcome) -> None:
            self._orders.pop(number, None)
            self.ordered += outcome.code is None

        self.commands.order(order, ended, only)

    def _new_order(self) -> int:
        """Return the number of an order that begins now."""
        number = next(self._order_numbers)
        self._orders[number] = None
        return number

    def _tell_of_lending(self, device: FaultDevice, word: LendingMessage) -> None:
        message = lending_message(word)
        self._send(device, lambda: self.leases.lending_message(device, message), up=True)

    def _strike(self, device: FaultDevice, request_id: str, step: MigrationStep) -> None:
        """As likely as not, let something go wrong about a request that migrates: an end dies; a
        connection stands still until an answer is late, and then the request moves again, or its
        target dies; its client stops reading, and leaves."""
        rng, timers = self.spite, self.timers
        key = request_id, type(step)
        if rng is None or key in self._struck or rng.random() < 0.5:
            return
        self._struck.add(key)
        target = self._targets.get(request_id, device)
        (client,) = (c for c in self.clients if c.submission.id == request_id)
        match rng.randrange(4):
            case 0:
                self.timers.call_later(rng.uniform(0, 1), partial(self.die, device))
            case 1 | 2:
                up = device.name, True
                late = timers.now() + ANSWER_SECONDS
                self._last[up] = max(self._last.get(up, 0.0), late + rng.uniform(0, 3))
                again = partial(self._migrate, device, client.submission.model)
                then = again if rng.random() < 0.5 else partial(self.die, target)
                timers.call_at(late + rng.uniform(0, 1), then)
            case 3:
                timers.call_later(rng.uniform(0, 0.2), partial(self._pace, client, True))
                timers.call_later(rng.uniform(1, 15), partial(self._leave, client))

    def _stall(self) -> None:
        """Let a connection stand still for longer than an answer is awaited."""
        key = self.random.choice(self._all).name, self.random.random() < 0.5
        until = self.timers.now() + self.random.uniform(5, 15)
        self._last[key] = max(self._last.get(key, 0.0), until)

    # -- the worker -------------------------------------------------------------------------------

    def _report(self, device: FaultDevice) -> DeviceReport:
        process = device.process
        models = tuple(
            _model_report(name, resident=name in process.resident) for name in process.served
        )
        return DeviceReport(
            device=device.name,
            now=process.memory.clock(self.timers.now()),
            page_bytes=1,
            total=N_PAGES,
            free=process.memory.pool.free,
            reclaiming=0,
            owners={},
            models=models,
            jobs=0,
            draining=False,
        )

    def _report_later(self, device: FaultDevice, process: Worker) -> None:
        def report() -> None:
            if process.alive and process is device.process and not process.hung:
                self._send(device, partial(self._reported, device, self._report(device)), up=True)
                self.timers.call_later(REPORT_SECONDS, report)

        self.timers.call_later(REPORT_SECONDS, report)

    def _reported(self, device: FaultDevice, report: DeviceReport) -> None:
        device.report = report
        device.requests.reported()
        self.migrations.reported(device)

    def carry_out(
        self,
        device: FaultDevice,
        command: Command,
        answered: Callable[[CommandOutcome], object],
    ) -> None:
        """Let a worker carry out an order."""
        process = device.process

        def answer(outcome: CommandOutcome) -> None:
            def deliver() -> None:
                if not isinstance(command, Lend | Recall):
                    device.carried_out(command, outcome)
                answered(outcome)

            self._send(device, deliver, up=True)

        def done() -> None:
            answer(CommandOutcome(specs={m: _spec(m) for m in sorted(process.served)}))

        def bring(model: str, to: set[str]) -> None:
            if process.alive and not process.hung:
                to.add(model)
                done()

        seconds, unlucky = self.random.uniform(0, 1), self.random.random() < 0.3
        match command:
            case Lend() | Recall():
                process.memory.order(command, self.timers.now(), answer)
            case Add(settings) if not unlucky and settings.name not in process.served:
                self.timers.call_later(seconds, partial(bring, settings.name, process.served))
            case ActivateCommand(model) if not unlucky and model in process.served:
                self.timers.call_later(seconds, partial(bring, model, process.resident))
            case EvictCommand(model) if model in process.served:
                process.resident.discard(model)
                done()
            case Remove(model) if model in process.served:
                process.going[model] = lambda outcome: done()
                self._let_go(process)
            case _:
                answer(CommandOutcome("refused", "by chance"))

    @staticmethod
    def _let_go(process: Worker) -> None:
        """Remove the models that leave, and have no requests any more."""
        running = {r.submission.model for r in process.requests.values()}
        for model in [m for m in process.going if m not in running]:
            process.served.discard(model)
            process.resident.discard(model)
            process.going.pop(model)(CommandOutcome())

    def handle(self, device: FaultDevice, message: ToWorker) -> None:
        """Let a worker handle a message of the controller."""
        process = device.process
        match message:
            case SubmitMsg():
                for submission in message.unwrap():
                    if submission.model in process.served - process.going.keys():
                        self._admit(process, submission)
                    else:
                        failed = FailedOutput(submission.id, "unknown_model", "it is not here")
                        self._tell(device, [failed])
            case WithdrawMsg():
                for i in message.request_ids:
                    if process.requests.pop(i, None) is not None:
                        self._tell(device, [CancelledOutput(i)])
                        if i in process.departing:
                            self._depart(device, i, None)
            case FlowControlMsg():
                for i in (*message.paused, *message.resumed):
                    if i in process.requests:
                        process.requests[i].paused = i in message.paused
            case MigrationOrderMsg():
                self._migration_step(device, message.order)
            case MeetPeerMsg() | PeerEndedMsg() | LeaseMsg():
                process.memory.handle(message)

    def _admit(self, process: Worker, submission: Submission) -> None:
        tokens = [*submission.prompt, *(submission.resumed or ())]
        kv: list[int] = []
        imported = process.imported.pop(submission.id, None)
        if imported is not None and len(imported[0]) <= len(tokens):
            kv = imported[0]  # what is wrong in it shows in the answer
        process.resident.add(submission.model)
        process.requests[submission.id] = Running(submission, tokens, kv)

    def _compute_later(self, device: FaultDevice, process: Worker) -> None:
        def compute() -> None:
            if process.alive and process is device.process and not process.hung:
                self._compute(device)
                process.memory.step(self.timers.now())
                self._let_go(process)
                self.timers.call_later(self.random.uniform(0.01, self.step_seconds), compute)

        self.timers.call_later(self.random.uniform(0.01, self.step_seconds), compute)

    def _compute(self, device: FaultDevice) -> None:
        """Run a step: one token for each request, and departures of those that can leave."""
        process = device.process
        outputs: list[Output] = []
        for i, r in list(process.requests.items()):
            if i in process.departing and len(r.kv) % BLOCK == 0:
                del process.requests[i]
                outputs.append(CancelledOutput(i))
                self._tell(device, outputs)
                outputs = []
                self._depart(device, i, r)
                continue
            if r.paused:
                continue
            done = r.generated >= r.submission.max_tokens
            if not done:
                r.kv += r.tokens[len(r.kv) :]
                r.tokens.append(next_token(r.submission.model, r.kv))
                outputs.append(TokenOutput(i, r.tokens[-1], r.generated - 1))
                done = r.generated >= r.submission.max_tokens
            if done:
                del process.requests[i]
                outputs.append(FinishedOutput(i, "length", 0, 0, 0, 0))
                if i in process.departing:
                    self._tell(device, outputs)
                    outputs = []
                    self._depart(device, i, None)
        self._tell(device, outputs)

    def _tell(self, device: FaultDevice, outputs: Sequence[Output]) -> None:
        def deliver() -> None:
            for output in outputs:
                device.requests.deliver(output)
            device.requests.dispatch()

        if outputs:
            self._send(device, deliver, up=True)

    def _answer(self, device: FaultDevice, answer: MigrationAnswer) -> None:
        self._send(device, lambda: self.migrations.migration_message(device, answer), up=True)

    def _depart(self, device: FaultDevice, i: str, request: Running | None) -> None:
        process = device.process
        attempt = process.departing.pop(i)
        tokens, exported = process.exported.pop(i, (0, -1))
        intact = request is not None and exported == attempt
        tail = request.kv[tokens:] if request is not None and intact else []
        data = msgspec.msgpack.encode(tail)
        self._answer(device, DepartedAnswer(i, intact, len(tail), data, attempt))

    def _migration_step(self, device: FaultDevice, step: MigrationStep) -> None:
        process = device.process
        match step:
            case ExportKvEvent(i, attempt):
                self._strike(device, i, step)
                r = process.requests.get(i)
                tokens = 0 if r is None or r.paused else len(r.kv) // BLOCK * BLOCK
                process.exported[i] = tokens, attempt
                self._answer(device, KvExportedAnswer(i, tokens, "form", ((0, 1),), attempt))
            case ImportKvEvent(prefix, attempt=attempt):
                self._targets[prefix.id] = device
                self._strike(device, prefix.id, step)
                fits = prefix.model in process.resident and self.random.random() < 0.9
                stalls = fits and self.random.random() < 0.1
                process.importing[prefix.id] = attempt
                read = partial(self._imported, device, process, prefix, attempt, fits)
                if stalls:  # the link between the two workers
                    self.timers.call_later(self.random.uniform(1, 20), read)
                else:
                    read()
            case DepartEvent(i, attempt):
                self._strike(device, i, step)
                process.departing[i] = attempt
                if i not in process.requests:
                    self._depart(device, i, None)
            case KvTailEvent(i, _, data, attempt):
                held = process.imported.get(i)
                if held is None:
                    self.stray += 1
                elif held[1] == attempt:
                    held[0].extend(msgspec.msgpack.decode(data, type=list[int]))
            case DropKvEvent(i):
                process.imported.pop(i, None)
                process.importing.pop(i, None)

    def _imported(
        self, device: FaultDevice, process: Worker, prefix: Submission, attempt: int, fits: bool
    ) -> None:
        """Let a worker have the KV of a request, unless it was told to drop it meanwhile."""
        live = process is device.process and process.alive and not process.hung
        if not live or process.importing.get(prefix.id) != attempt:
            return
        del process.importing[prefix.id]
        if fits:
            process.imported[prefix.id] = list(prefix.prompt), attempt
        n = len(prefix.prompt) if fits else 0
        self._answer(device, KvImportedAnswer(prefix.id, n, attempt))


def _settings(models: Sequence[str]) -> tuple[ModelSettings, ...]:
    return tuple(ModelSettings(name=model, path=model) for model in models)


def _spec(name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=1,
        n_heads=1,
        kv_heads=1,
        head_dim=8,
        hidden=8,
        intermediate=8,
        vocab=VOCAB,
        dtype="float32",
        max_model_len=256,
        block_tokens=BLOCK,
        segment_bytes=(8,),
        fingerprint="0123456789abcdef",
    )


_REPORT = ModelReport(
    name="",
    residency="absent",
    weight_pages=0,
    kv_pages=1,
    cached_pages=0,
    waiting=0,
    running=0,
    late=0,
    lane_seconds=0.0,
    activations=0,
    evictions=0,
    preemptions=0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
)


@functools.cache
def _model_report(name: str, *, resident: bool) -> ModelReport:
    state = Residency.RESIDENT if resident else Residency.ABSENT
    return replace(_REPORT, name=name, residency=state.value)
