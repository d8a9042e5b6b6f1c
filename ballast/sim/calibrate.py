"""Measure a profile of this machine: costs of jobs per model, link bandwidth, loop overhead.

Used by `ballast demo`, `ballast bench` and `ballast profile`, so that runs in virtual time use the
costs of the machine that ran live. It runs models; the machine must be otherwise idle.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.cluster.machine_choice import machine_of_one_rank
from ballast.core.actions import Short
from ballast.core.errors import DeviceError
from ballast.core.event import (
    ArrivalEvent,
    DrainEvent,
    FinishedOutput,
    Output,
    TokenOutput,
    TransferDoneEvent,
)
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.engine.model import ModelState
from ballast.live.device import LiveDevice
from ballast.live.machine import MakeMachine
from ballast.sim.frozen_heap import frozen_heap
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.measure_copies import copying
from ballast.sim.measure_link import LinkMeter
from ballast.sim.page_costs import PageCosts
from ballast.sim.story_costs import fit_jobs, jobs_of, slower_than, spread_of, with_loop
from ballast.weights.host import HostModel


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent together, but for a late one."""

    at_once: Sequence[Submission]
    late: Submission | None
    delay: float
    """Seconds from the others to the late one."""
    pause: float
    """Seconds to wait when all are answered."""

    @property
    def requests(self) -> list[Submission]:
        """In the order in which they are sent."""
        return [*self.at_once, *(() if self.late is None else (self.late,))]


PRESET = "balloon+round-robin"
"""Serves the bursts. Models take turns, so that jobs come after other models' in quick succession
as well as after a while."""
BURSTS = (1, 1, 2, 4, 8, 16)
"""Sizes of the bursts of requests in the calibration run."""
PAUSES = (0.02, 0.1)
"""Seconds without work between bursts; from 20 ms on their length makes no difference."""
LATEST = 0.1
"""Most seconds by which a late request comes after the others of its burst."""
MOST_CONTEXT = 512
MOST_OUTPUT = 24


def calibrate(
    fleet: FleetSettings,
    rounds: int = 4,
    seed: int = 0,
    make_machine: MakeMachine = machine_of_one_rank,
    progress: Callable[[str, int, int | None], object] = lambda what, done, total: None,
) -> MachineProfile:
    """Measure a profile of this machine for the fleet's models; see `calibrated`."""
    return calibrated(fleet, rounds, seed, make_machine, progress)[0]


def calibrated(
    fleet: FleetSettings,
    rounds: int = 4,
    seed: int = 0,
    make_machine: MakeMachine = machine_of_one_rank,
    progress: Callable[[str, int, int | None], object] = lambda what, done, total: None,
) -> tuple[MachineProfile, list[ModelSpec]]:
    """Measure a profile of this machine for the fleet's models; returns their sizes as well.

    Every model is activated a few times over the (paced) link, timed. Then the loop serves bursts
    of random requests of all models, and job costs are fitted to its story: jobs timed alone in an
    idle process are up to a third shorter than jobs of a loop with a client. Models whose jobs cost
    the same are measured once (`by_sizes`). In each round every one of the others gets bursts of
    all sizes, so that measurements of a model lie apart in time: the speed of a machine drifts.
    Takes 15 to 30 seconds a round for eight small models on two cores; the machine must be idle.
    `progress` gets the current step, its parts done, and its parts in all.
    """
    client = _Client(rounds, seed, progress)
    link, mapping = LinkMeter(), _Mapping()
    entries: list[dict[str, Any]] = []
    progress(f"measuring: loading {len(fleet.models)} models", 0, None)
    one_lane = replace(fleet.device, lanes=1)
    device = LiveDevice(
        replace(fleet, device=one_lane, preset=PRESET, options={}),
        client.receive,
        sink=entries.extend,
        make_machine=make_machine,
    )
    try:
        device.populate()
        stands_for = by_sizes(device.models.by_name)
        for i in range(rounds):
            progress("measuring transfers", i, rounds)
            _activate_all(device, link, mapping)
        client.device, client.specs = device, [device.specs[name] for name in stands_for]
        sender = threading.Thread(target=client.send_bursts, daemon=True)
        with frozen_heap():
            sender.start()
            device.run()
            sender.join()
        specs = list(device.specs.values())
        unserved = sorted(set(stands_for) - client.served)
    finally:
        device.close()
    if unserved:
        raise DeviceError("calibrate", f"no request of {', '.join(unserved)} was answered")
    before = [e for e in entries if e["at"] < client.beside_from]
    beside = [e for e in entries if e["at"] >= client.beside_from]
    receipt_seconds = [e["at"] - e["arrival"] for e in before if e.get("event") == "Arrival"]
    profile = MachineProfile(
        costs={},
        link=link.rates(),
        overhead=0.0,
        page_seconds=mapping.page_seconds,
        pages=mapping.costs,
        early=device.machine.copies_beside_jobs,
        answer=statistics.median(receipt_seconds) + statistics.median(client.answer_seconds),
    )
    return _for_all(with_engine(profile, before, beside), stands_for), specs


def _for_all(found: MachineProfile, stands_for: Mapping[str, Sequence[str]]) -> MachineProfile:
    """Return the profile with the costs of all models, by those that were measured."""
    costs = {name: found.costs[of] for of, names in stands_for.items() for name in names}
    return replace(found, costs=costs)


def by_sizes(hosts: Mapping[str, HostModel]) -> dict[str, list[str]]:
    """Return the models to measure, each with those whose jobs cost the same, itself among them:
    models of equal layers in equal layouts, as fine-tunes of one model are. Where all are equal,
    two are measured, as models take turns."""
    kinds: dict[Hashable, list[str]] = {}
    for name, host in hosts.items():
        s = host.spec
        sizes = (s.n_heads, s.kv_heads, s.dtype, s.block_tokens, s.layer_kv, s.states)
        experts = (s.experts_per_token, len(s.adapters), s.pooling)
        kinds.setdefault((host.segments, host.windows, sizes, experts), []).append(name)
    found = {names[0]: names for names in kinds.values()}
    if len(found) == 1 and len(hosts) > 1:
        [names] = found.values()
        return {names[0]: names[:1], names[1]: names[1:]}
    return found


def _activate_all(device: LiveDevice, link: LinkMeter, mapping: _Mapping) -> None:
    """Bring each model to the device and off again, timed."""
    for m in device.state.models.values():
        link.activated(mapping.activate(device, m))
        link.measure(device, m)
        mapping.evict(device, m)


def with_engine(
    profile: MachineProfile,
    entries: Sequence[Mapping[str, Any]],
    beside_copies: Sequence[Mapping[str, Any]] = (),
) -> MachineProfile:
    """Return `profile` with costs of jobs, and of the loop, fitted to a story's `entries`;
    `beside_copies`: those from while bytes moved over the link, if any did."""
    jobs = jobs_of(entries)
    in_jobs = fit_jobs(jobs)
    overhead, fit = with_loop(jobs, in_jobs)
    slow = slower_than(in_jobs, jobs_of(beside_copies)) if beside_copies else profile.copies_slow
    return replace(
        profile,
        costs=fit.costs,
        overhead=overhead,
        wake=fit.cold.wake,
        settling=fit.cold.settling,
        switch=fit.cold.switch,
        switch_back=fit.cold.switch_back,
        turn=fit.turn,
        spread=spread_of(jobs, in_jobs),
        copies_slow=slow,
    )


def bursts(specs: Sequence[ModelSpec], rounds: int, seed: int) -> Iterator[Burst]:
    """Yield the bursts of a calibration: in each round every model gets bursts of all `BURSTS`.

    The first of them is a request alone. About every other one of the rest has a request of another
    model beside its own, and to each comes a late one, of its model or another: the loop turns
    while a job runs, and a prompt is computed beside decodes.
    """
    rng = random.Random(seed)
    for i in range(rounds):
        sizes = [(spec, k) for spec in specs for k in range(len(BURSTS))]
        rng.shuffle(sizes)
        for j, (spec, k) in enumerate(sizes):
            models, late = [spec] * BURSTS[k], None
            name = f"calibrate-{i}-{j}"
            if k > 0:
                others = [s for s in specs if s is not spec]
                if others and rng.random() < 0.5:
                    models.append(rng.choice(others))
                late = _request(rng, rng.choice((spec, rng.choice(specs))), f"{name}-late")
            requests = [_request(rng, model, f"{name}-{n}") for n, model in enumerate(models)]
            yield Burst(requests, late, rng.uniform(0.0, LATEST), rng.choice(PAUSES))


def _request(rng: random.Random, spec: ModelSpec, id: str) -> Submission:
    """Return a request of a model with a random prompt and length."""
    output = min(rng.randint(2, MOST_OUTPUT), spec.max_model_len - 1)
    most = min(MOST_CONTEXT, spec.max_model_len - output)
    length = round(2 ** rng.uniform(1.0, max(1.0, math.log2(most)))) if most > 1 else 1
    return Submission(
        id=id,
        model=spec.name,
        prompt=tuple(rng.randrange(spec.vocab) for _ in range(min(length, most))),
        max_tokens=output,
        ignore_eos=True,
    )


class _Mapping:
    """Activate and evict models, and record the seconds beyond their copies."""

    def __init__(self) -> None:
        self._mapping = self._unmapping = 0.0
        """Seconds."""
        self._pages = 0

    @property
    def page_seconds(self) -> float:
        return (self._mapping + self._unmapping) / self._pages

    @property
    def costs(self) -> PageCosts:
        """Measured costs of mapping weights. Mapping of KV is part of job costs, and of the gaps
        between jobs (`with_loop`)."""
        return PageCosts(
            map=self._mapping / self._pages, unmap=self._unmapping / self._pages, kv=False
        )

    def activate(self, device: LiveDevice, m: ModelState) -> TransferDoneEvent:
        began = device.clock.now()
        short = m.weights.activate(device.state.next_transfer())
        if isinstance(short, Short):
            raise DeviceError("calibrate", f"{m.spec.name} alone is short of {short.pages} pages")
        event = device.inbox.take(None)[0]
        assert isinstance(event, TransferDoneEvent)
        self._mapping += max(0.0, device.clock.now() - began - event.seconds)
        self._pages += event.n_bytes // device.fleet.device.page_bytes
        return event

    def evict(self, device: LiveDevice, m: ModelState) -> None:
        began = device.clock.now()
        m.weights.evict()
        self._unmapping += device.clock.now() - began


class _Client:
    """Sends bursts of requests, each when the one before has been answered."""

    def __init__(
        self, rounds: int, seed: int, progress: Callable[[str, int, int | None], object]
    ) -> None:
        self.device: LiveDevice | None = None
        """Before the loop runs."""
        self.specs: list[ModelSpec] = []
        """The models that are asked."""
        self.served: set[str] = set()
        """Models of which a request was answered."""
        self.answer_seconds: list[float] = []
        """Seconds from the beginning of a turn until its tokens were here, before `beside_from`."""
        self.beside_from = math.inf
        """When bytes began to move beside jobs, on the story's clock; infinity: they did not."""
        self._rounds = rounds
        self._seed = seed
        self._progress = progress
        self._open: dict[str, str] = {}
        """Model by request."""
        self._changed = threading.Condition()

    def receive(self, outputs: list[Output]) -> None:
        """Record outputs; called on the loop's thread."""
        assert self.device is not None
        if self.device.loop.turn_since is not None and self.beside_from == math.inf:
            seconds = self.device.clock.now() - self.device.loop.turn_since
            self.answer_seconds.append(seconds)
        ends = [o for o in outputs if not isinstance(o, TokenOutput)]
        if not ends:
            return
        with self._changed:
            for end in ends:
                model = self._open.pop(end.request_id)
                if isinstance(end, FinishedOutput):
                    self.served.add(model)
            self._changed.notify_all()

    def send_bursts(self) -> None:
        """Send all rounds of bursts, then drain the device."""
        device = self.device
        assert device is not None
        specs = self.specs
        n = self._rounds * len(specs) * len(BURSTS)
        for i, burst in enumerate(bursts(specs, self._rounds, self._seed)):
            self._progress("measuring jobs", i, n)
            self._send(device, burst)
        self._progress("measuring jobs", n, n)
        with copying(device) as moving:
            if moving:
                self.beside_from = device.clock.now()
                again = list(bursts(specs, 1, self._seed + 1))
                for i, burst in enumerate(again):
                    self._progress("measuring jobs beside copies", i, len(again))
                    self._send(device, burst)
                self._progress("measuring jobs beside copies", len(again), len(again))
        device.post(DrainEvent())

    def _send(self, device: LiveDevice, burst: Burst) -> None:
        """Send requests, and wait until all are answered, and as long as the pause."""
        for submission in burst.at_once:
            self._post(device, submission)
        if burst.late is not None:
            time.sleep(burst.delay)
            self._post(device, burst.late)
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
            # Nothing will come: a wait that only time ends.
            self._changed.wait(burst.pause)

    def _post(self, device: LiveDevice, submission: Submission) -> None:
        with self._changed:
            self._open[submission.id] = submission.model
        device.post(ArrivalEvent(submission))
