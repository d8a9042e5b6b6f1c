"""Run a scenario in virtual time, and hold the device to its promises after every turn.

What is checked, and why it must hold:

**Books.** Pool, KV caches, weights and leases agree (`validate`), snapshots are not stale.

**Every request that was accepted ends**, once, within bounded time: finished, cancelled, or failed
with a code that its model or an operator has given cause for (`Watch._may_fail`): `out_of_memory`
only where the device could no longer serve it alone.

**The loop does not spin.** A turn takes at least one event, or is one for which a policy, a limit
on waiting, or a time to live has asked. So turns at one moment are bounded by the events of that
moment, and turns of the timer alone by the other turns.

**Undoing makes progress.** A request is undone only for one that comes before it (`Precedence`),
and that one then goes on: it computes tokens that it never had computed before, or ends. Let `n` be
the number of requests before it that are open, and `x` the number of things that operators, clients
and peers have done so far beside asking. Each of the `n` may undo it twice before any of them has
got on, once for its model's weights and once for its own KV, and each of the `x` once in all. So
between two moments at which somebody before it gets on it is undone at most `2n + x` times; and as
those before it can get on no more often than they have tokens, `t` in all, at most
`(2n + x) * (t + n + 1)` times. The first of all is undone by operators
and peers alone. Two lanes whose victims take back what is freed break this at once: they are
undone again and again, and nobody before them gets on.

**Nobody waits while pages lie free that would serve it.** Of each model the first waiting request
is looked at, where it is pages that it lacks: its model is absent, or it was refused a place in
the last job. It must not stay so over several turns in which the clock moves while the pages that
are set aside for nobody, with those of caches (and, where models come and go, those of idle models;
for a request that is overdue where requests are undone for others, those of younger ones, as far as
shares let it have these undone), suffice. Where requests that wait undo nobody, caches are kept for
one that is overdue.

**Nobody is overtaken for ever.** Where requests that wait undo nobody, one that is overdue must not
see others, which come after it by priority and by when their first token is due, be admitted on
as many new pages as it lacks itself.

**Nobody is held for nothing.** Where models have fair shares, one that may not admit must not stay
so, over as many turns, while no first request of another model lacks pages.

**Nobody starves beside others' small requests.** Where models have fair shares, a request that was
put first in its queue, and lacks pages while its model runs nothing, is not passed by requests of
other models that are not more important.

**Caches are not emptied for a page.** Where a turn frees pages by nothing but dropping cached
prefixes, less than three slabs for each drop lie free unclaimed after it: one because drops are
made in whole slabs, two because a request may find at hand a part of what it was counted to lack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ballast.core.actions import (
    ActivateCommand,
    Change,
    EvictCommand,
    Join,
    Leave,
    Lend,
    LoopCommand,
    Recall,
)
from ballast.core.entries import Sink, StoryEntry
from ballast.core.event import (
    CancelEvent,
    CancelledOutput,
    FailedOutput,
    FinishedOutput,
    Output,
    PauseEvent,
    ResumeEvent,
)
from ballast.core.link import LinkRates
from ballast.core.request import Precedence, Request, Submission
from ballast.core.settings import Slo
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.engine.build import build_newcomer
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view, made_anew
from ballast.policy.market.fair_shares import fair_shares
from ballast.policy.presets import Preset, resolve
from ballast.sim.device import SimDevice, hosted_nowhere
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.no_bytes import copy_nothing
from tests.sim.neighbours import WAY, Neighbours
from tests.sim.scenarios import Act, Ask, Order, Scenario, Withdraw, submission
from tests.sim.test_leap import COSTS

NAMES = ("cpu:0", "cpu:1")
LONGEST = 3600.0
"""Virtual seconds from the last act within which all has ended: on the slowest link a step that
swaps KV takes half a second."""
AT_ONE_MOMENT = 40
"""Turns beside those that take events."""
TURNS_WAITED = 4
"""Turns, at moments of their own, in which pages may lie free before somebody waits in vain."""
SECONDS_WAITED = 0.3
"""The same in seconds: longer than any job, and than any copy of weights."""


class Broken(AssertionError):
    """A promise that the device did not keep."""


def insist(kept: bool, *result: object) -> None:
    """Raise Broken, with what is told, unless it was kept."""
    if not kept:
        raise Broken(" ".join(map(str, result)))


@dataclass(slots=True, eq=False)
class Followed:
    """A request that a device has accepted, while it is open."""

    request: Request
    best: int = 0
    """Most tokens that it ever had computed."""
    undone: int = 0
    """Preemptions that were seen."""
    in_a_row: int = 0
    """Of these, since one that comes before it got on."""


@dataclass(slots=True)
class InVain:
    """A request that waits while pages that would serve it lie free."""

    since: float
    turns: int = 0
    seen: float = -math.inf


@dataclass(slots=True)
class Overtaken:
    """A request that is overdue, and others that were admitted since."""

    lacked: int
    """Pages, when it was first seen so."""
    pages: int = 0
    """That others have got."""


class Watch:
    """Looks at one device after each turn; raises Broken."""

    def __init__(self, preset: Preset, also: Sink | None = None) -> None:
        """`also` gets the story as well."""
        self._also = also
        memory = preset.name.partition("+")[0]
        values = preset.values
        self.comes_and_goes = memory == "balloon"
        """Whether models come when asked for and go when idle."""
        self.undoes = memory == "balloon"
        """Whether younger work is undone for requests that wait."""
        self.pooled = memory in ("recompute", "mirage", "kvswap") and bool(values["pooled"])
        self.whole = memory == "swap"
        self.by_deadline = preset.order == "deadline"
        self.in_turns = memory == "swap" or bool(values.get("temporal"))
        """Whether models wait for their turn, whatever is free."""
        self.patience = values.get("patience", 0.5)
        self.fair = bool(values.get("fair_shares")) and not self.in_turns
        """Whether models are held that have more than their share."""
        self.asked: dict[str, Submission] = {}
        """By id, all that the device has been sent."""
        self.ends: dict[str, Output] = {}
        self.open: dict[str, Followed] = {}
        self.disturbances = 0
        """What operators, clients and peers have done beside asking."""
        self.shrunk = False
        """Whether an operator or a peer may have made the room smaller that requests had."""
        self.left: set[str] = set()
        """Models that an operator has taken away."""
        self.seen: Counter[str] = Counter()
        self._in_vain: dict[str, InVain] = {}
        self._overtaken: dict[str, Overtaken] = {}
        self._starved: set[str] = set()
        """First requests of models that run nothing, which were put first and lack pages."""
        self._kv_pages: dict[str, int] = {}
        self._running: set[str] = set()
        self._entries: list[StoryEntry] = []
        self._moment = (-math.inf, 0)
        self._timers = self._turns = 0
        self.state: DeviceState | None = None

    # -- what the device is given ------------------------------------------------------------------

    def sink(self, entries: Sequence[StoryEntry]) -> None:
        self._entries += entries
        if self._also is not None:
            self._also(entries)

    def said(self, now: float, output: Output) -> None:
        if not isinstance(output, FinishedOutput | FailedOutput | CancelledOutput):
            insist(output.request_id not in self.ends, "told after its end:", output)
            return
        insist(output.request_id not in self.ends, "ended twice:", output)
        self.ends[output.request_id] = output
        if isinstance(output, FailedOutput):
            self.seen[output.code] += 1
            self._may_fail(now, output)

    def observe(self, now: float, state: DeviceState) -> None:
        """After a turn, and the leap that follows it."""
        self.state = state
        entries, self._entries = self._entries, []
        self._books(state)
        self._spins(now, entries)
        self._undone(state)
        view = device_view(state)
        if not state.asking and state.stopped is None:
            self._flushed(state, view, entries)
            self._waits_in_vain(now, state, view)
            if self.pooled and not self.in_turns:
                self._is_overtaken(now, state, view)
            if self.fair:
                self._is_passed(now, state, view)
        self._kv_pages = {m.name: m.kv_pages for m in view.models}
        self._running = {r.id for m in view.models for r in m.running}

    def finish(self) -> None:
        """Nothing goes on any more."""
        assert self.state is not None
        self.state.pool.validate()
        for m in self.state.models.values():
            m.kv.validate([])
            m.weights.validate()
        missing = set(self.asked) - set(self.ends)
        insist(not missing, "never ended:", sorted(missing))

    # -- the rules ---------------------------------------------------------------------------------

    def _may_fail(self, now: float, failed: FailedOutput) -> None:
        followed = self.open.get(failed.request_id)
        accepted = None if followed is None else followed.request
        if accepted is None:  # refused when it arrived, or in the turn in which it did
            refusals = {"insufficient_memory", "context_length_exceeded", "queue_full"}
            if self.shrunk:  # by an operator, who may also have a model leave, or not yet join
                refusals |= {"model_not_found", "unavailable"}
            if failed.code in refusals:
                return
        state = self.state
        if state is not None and failed.code == "out_of_memory":
            s = self.asked[failed.request_id]
            m, _ = state.named[s.model]
            tokens = len(s.prompt) if accepted is None else len(accepted.tokens)
            pages = m.kv.layout.pages(ceil_div(tokens, m.spec.block_tokens))
            insist(pages > state.room(m), f"at {now} {failed}: {pages} pages fit alone")
            insist(self.shrunk, f"at {now} {failed}: it was accepted, and nobody made room smaller")
            return
        causes = {"queue_timeout"}
        if self.left:
            causes |= {"unavailable"}
        if not self.comes_and_goes and not self.in_turns:
            causes |= {"insufficient_memory"}  # its model has no place
        insist(failed.code in causes, f"at {now}", failed)

    def _spins(self, now: float, entries: list[StoryEntry]) -> None:
        events = [e["event"] for e in entries if "event" in e]
        at, turns = self._moment
        self._moment = now, turns + 1 if at == now else 1
        insist(self._moment[1] <= AT_ONE_MOMENT, f"{self._moment[1]} turns at {now}:", entries[-5:])
        self._timers += all(event == "Timer" for event in events)
        insist(self._timers <= 10 * (self._turns - self._timers + 50), f"only timers at {now}")

    def _undone(self, state: DeviceState) -> None:
        got_on: list[Precedence] = []
        for id in [id for id in self.open if id not in state.requests]:
            got_on.append(self.open.pop(id).request.order)
        for request in state.requests.values():
            followed = self.open.setdefault(request.id, Followed(request))
            if request.computed > followed.best:
                followed.best = request.computed
                got_on.append(request.order)
        first = min(got_on, default=None)
        orders = sorted(f.request.order for f in self.open.values())
        for followed in self.open.values():
            request = followed.request
            if first is not None and first < request.order:
                followed.in_a_row = 0
            new = request.preemptions - followed.undone
            if not new:
                continue
            followed.undone += new
            followed.in_a_row += new
            self.seen["preempted"] += new
            before = sum(order < request.order for order in (*orders, *got_on))
            most = 2 * before + self.disturbances
            insist(
                followed.in_a_row <= most,
                f"at {state.now} {request.id} was undone {followed.in_a_row} times in a row, and",
                f"none of the {before} before it got on",
            )

    def _books(self, state: DeviceState) -> None:
        """The pool's, and of the models in turn one's."""
        state.pool.validate()
        state.lending.validate()
        self._turns += 1
        if not state.models:
            return
        m = list(state.models.values())[self._turns % len(state.models)]
        m.kv.validate([r.blocks for r in m.running])
        m.weights.validate()
        if m.kv.bounds.limit is not None and not self.shrunk:
            within = m.kv.pages <= m.kv.bounds.limit
            insist(within, f"at {state.now} {m.spec.name} is over its limit")
        kept, fresh = device_view(state).model(m.spec.name), made_anew(m)
        if kept != fresh:
            insist(False, f"at {state.now} a snapshot is stale:", _difference(kept, fresh))

    def _flushed(self, state: DeviceState, view: DeviceView, entries: list[StoryEntry]) -> None:
        acts = [e for e in entries if "action" in e and "refused" not in e and e.get("by") is None]
        drops = [e for e in acts if e["action"] == "DropCache"]
        others = {e["action"] for e in acts} - {"DropCache", "Activate", "Hold"}
        if not drops or others or self._disturbed(entries) or not state.lending.alone:
            return  # what else frees pages, or what lies on pages of another device
        if sum("promises" in e for e in entries) > 1:
            return  # overtaken in the same turn by somebody who comes before, and needs less
        if self.whole:
            return  # one model has the device: what it freed is free until its next job
        if any(m.paused for m in state.models.values()):
            return  # who was paused when a job ended has left its pages to its model
        if any(
            m.staging is not None and (m.staging.staged or m.staging.moving) for m in view.models
        ):
            return  # pages that blocks leave, or come home to, are counted before they have moved
        self.seen["dropped"] += 1
        slabs = {m.name: m.slab_pages for m in view.models}
        bound = sum(3 * slabs[e["model"]] for e in drops)
        free = state.pool.free - state.pool.ledger.reservations.promised
        insist(free < bound, f"at {state.now} {free} pages lie free after", drops)

    @staticmethod
    def _disturbed(entries: list[StoryEntry]) -> bool:
        """Whether operators or peers did something, or the books of a model changed otherwise."""
        quiet = {"Arrival", "JobDone", "Leap", "Timer", "TransferDone", "Drain"}
        return any(e.get("event", "Timer") not in quiet or "vacated" in e for e in entries)

    def _waits_in_vain(self, now: float, state: DeviceState, view: DeviceView) -> None:
        waiting = {}
        for m in view.models:
            if m.waiting and not m.frozen:
                held = self._held_for_nobody(view, m) if self.fair else None
                why = held if m.held else self._pages_for(state, view, m)
                if why is not None:
                    waiting[m.waiting[0].id] = why
        self._in_vain = {id: w for id, w in self._in_vain.items() if id in waiting}
        for id, why in waiting.items():
            found = self._in_vain.setdefault(id, InVain(now))
            if now > found.seen:
                found.seen = now
                found.turns += 1
            waited = now - found.since
            insist(
                found.turns < TURNS_WAITED or waited < SECONDS_WAITED,
                f"at {now} {id} has waited {waited:.3f} s and {found.turns} turns: {why}",
            )

    def _undone_for(self, view: DeviceView, m: ModelView, first: RequestView, o: ModelView) -> int:
        """Pages of `o` that may be undone for the first request of `m`, which is overdue: of those
        that come after it. Where models have shares, of less important ones and of those beyond
        the share of `o`; a request that was put first in its queue needs no share."""
        after = [r for r in o.running if r.order > first.order]
        younger = sum(r.pages for r in after)
        if not self.fair or first.place < 0:
            return younger
        less = sum(r.pages for r in after if r.order.rank > first.order.rank)
        used = {v.name: v.kv_pages - v.cached_pages for v in view.models}
        share = fair_shares(view)
        if m.name in share and m.running and used[m.name] + m.first_pages > share[m.name]:
            return less
        return max(less, min(younger, int(used[o.name] - share.get(o.name, 0.0))))

    @staticmethod
    def _held_for_nobody(view: DeviceView, m: ModelView) -> str | None:
        """That `m` is held while no other model's first request lacks pages, if that is so."""
        firsts = {o.waiting[0].id for o in view.models if o.waiting and not o.held}
        if any(s.request_id in firsts and not s.limited for s in view.shortages):
            return None
        return f"{m.name} is held, and nobody lacks pages"

    def _pages_for(self, state: DeviceState, view: DeviceView, m: ModelView) -> str | None:
        """How the first waiting request of `m` could be served; None: it could not now."""
        first = m.waiting[0]
        absent = m.residency is Residency.ABSENT
        if absent:
            if self.in_turns or not (self.comes_and_goes or self.pooled):
                return None
            lacks = m.missing_pages + max(0, m.first_pages - view.borrowed)
        elif m.residency is Residency.RESIDENT:
            short = [s for s in view.shortages if s.request_id == first.id]
            if not short or short[0].limited:
                return None
            lacks = short[0].pages - view.borrowed // m.slab_pages * m.slab_pages
        else:
            return None
        pool, mine = state.pool, state.models[m.name]
        owners = {mine.kv.owner, mine.weights.owner}
        free = (
            pool.free
            - pool.ledger.reservations.promised
            + sum(map(pool.ledger.reservations.promised_to, owners))
        )
        caches = sum(o.cached_pages for o in view.models) - m.first_cached_pages
        if self.pooled and self._kept(view, m):
            caches = 0
        idle = younger = 0
        others = [o for o in view.models if o is not m and o.residency is Residency.RESIDENT]
        if self.comes_and_goes:
            gone = [o for o in others if o.idle and not o.spec.pinned]
            idle = sum(o.own_pages - o.freed_pages + o.kv_pages - o.cached_pages for o in gone)
        if self.undoes and _overdue(view, first, self.patience):
            younger = sum(self._undone_for(view, m, first, o) for o in view.models)
        there = free + caches + idle + younger
        aside = sum(map(pool.ledger.reservations.promised_to, owners))
        if lacks > there or (not absent and lacks <= aside):
            return None  # it lacks none any more: when it goes on is for the order of compute
        if not absent and self.by_deadline and lacks <= free:
            return None  # the same: a job with no room for prompts does not try it again
        return f"it lacks {lacks} pages; {free} free, {caches} cached, {idle} idle, {younger} later"

    @staticmethod
    def _kept(view: DeviceView, m: ModelView) -> bool:
        """Whether caches are kept for a request that is overdue and comes before the first of `m`,
        where requests that wait undo nobody."""
        due = _due(m.waiting[0])
        firsts = (o.waiting[0] for o in view.models if o.waiting and o is not m)
        return any(_overdue(view, r, 0.5) and _due(r) < due for r in firsts)

    def _is_overtaken(self, now: float, state: DeviceState, view: DeviceView) -> None:
        admitted = [
            (state.models[o.name], r)
            for o in view.models
            for r in o.running
            if r.id not in self._running
        ]
        late: dict[str, Overtaken] = {}
        for v in view.models:
            if not v.waiting or v.held or v.residency is not Residency.RESIDENT:
                continue
            first = v.waiting[0]
            short = [s for s in view.shortages if s.request_id == first.id and not s.limited]
            if not short or not _overdue(view, first, 0.5):
                continue
            if (
                state.pool.ledger.reservations.promised_to(state.models[v.name].kv.owner)
                >= short[0].pages
            ):
                continue  # it lacks none any more: when it goes on is for the order of compute
            found = self._overtaken.get(first.id)
            if found is None:  # what came before is not counted
                late[first.id] = Overtaken(short[0].pages)
                continue
            late[first.id] = found
            for m, r in admitted:
                if _due(r) <= _due(first) or v.name == m.spec.name:
                    continue
                grown = m.kv.pages - self._kv_pages.get(m.spec.name, 0)
                blocks = len(state.requests[r.id].blocks)
                found.pages += max(0, min(grown, m.kv.layout.pages(blocks)))
            insist(
                found.pages < found.lacked,
                f"at {now} others got {found.pages} pages since {first.id} is overdue,",
                f"which lacked {found.lacked}",
            )
        self._overtaken = late

    def _is_passed(self, now: float, state: DeviceState, view: DeviceView) -> None:
        """One that was put first in its queue, of a model that runs nothing."""
        admitted = {r.id: r for m in view.models for r in m.running if r.id not in self._running}
        last, self._starved = self._starved, set[str]()
        for v in view.models:
            if not v.waiting or v.running or v.residency is not Residency.RESIDENT:
                continue
            first = v.waiting[0]
            short = [s for s in view.shortages if s.request_id == first.id and not s.limited]
            if first.place < 0 and short:
                self._starved.add(first.id)
        for id in self._starved & last if len(self._starved | last) == 1 else ():
            order = state.requests[id].order
            passing = [r.id for r in admitted.values() if r.order.rank >= order.rank]
            insist(not passing, f"at {now} {passing} passed {id}, which was put first")


def _due(r: RequestView) -> tuple[int, float]:
    """By what those who wait are put in order, where they undo nobody."""
    return r.order.rank, min(r.due, r.order.arrival + 10.0)


def _overdue(view: DeviceView, r: RequestView, patience: float) -> bool:
    return view.now >= r.order.arrival + patience * (r.due - r.order.arrival)


def _difference(a: ModelView, b: ModelView) -> str:
    names = (field.name for field in fields(a) if field.compare)
    found = (
        f"{n}: {getattr(a, n)} is {getattr(b, n)}" for n in names if getattr(a, n) != getattr(b, n)
    )
    return f"{a.name}: {'; '.join(found)}"


# -- a run ---------------------------------------------------------------------------------------


class Run:
    """A scenario on its device, or its two."""

    def __init__(self, scenario: Scenario, sinks: Mapping[str, Sink] | None = None) -> None:
        """`sinks`: what gets a device's story as well, by its name."""
        self.scenario = scenario
        preset = resolve(scenario.preset, dict(scenario.options))
        specs = scenario.specs
        self.watches: dict[str, Watch] = {}
        sims: dict[str, SimDevice] = {}
        profile = MachineProfile(
            costs=dict.fromkeys((s.name for s in specs), COSTS),
            link=LinkRates.even(scenario.link),
            overhead=3e-4,
        )
        for name in NAMES if scenario.peer else NAMES[:1]:
            settings = replace(scenario.settings, name=name)
            if name != NAMES[0]:
                more = scenario.peer * settings.page_bytes
                settings = replace(settings, budget_bytes=settings.budget_bytes + more)
            self.watches[name] = w = Watch(preset, (sinks or {}).get(name))
            sims[name] = SimDevice(
                settings, specs, preset, profile, w.said, w.sink, w.observe, leaps=scenario.leaps
            )
        self.devices = Neighbours(sims)
        if scenario.peer:
            self.devices.meet()
        self.asked: dict[str, str] = {}
        """Device by request."""
        self._joiners = list(scenario.joiners)
        self._names = [s.name for s in specs]

    def __call__(self) -> Counter[str]:
        """Run to the end; what was seen."""
        for act in self.scenario.acts:
            self.devices.go(act.after)
            self._do(act)
        end = self.devices.now + LONGEST
        while any(sim.open_requests for sim in self.devices.sims.values()) or self._due:
            self.devices.go(0.05 if len(self.devices.sims) > 1 else 1.0)
            insist(self.devices.now < end, "never ends:", self._open())
        self._end()
        for w in self.watches.values():
            w.finish()
        return sum((w.seen for w in self.watches.values()), Counter[str]())

    def _open(self) -> str:
        sims = self.devices.sims.values()
        return "; ".join(
            f"{r.id} of {r.model} {r.state.value}" for s in sims for r in s.state.requests.values()
        )

    @property
    def _due(self) -> bool:
        """Whether something that was asked has not arrived."""
        known = set().union(*(w.ends for w in self.watches.values()))
        return bool(set(self.asked) - known)

    def _end(self) -> None:
        sims = self.devices.sims
        if len(sims) > 1:
            for name in sims:
                self.devices.order(name, Recall(self.devices.other(name), None, 1000.0))
            self.devices.go(1.0)
            insist(not self.devices.seen["late"], "pages were not returned in time")
        for sim in sims.values():
            if len(sims) > 1:
                insist(not sim.state.lending.lent and not sim.state.lending.borrowed, "lent still")
            sim.finish(self.devices.now)

    def _do(self, act: Act) -> None:
        devices = self.devices
        if isinstance(act, Ask):
            self._ask(act)
        elif isinstance(act, Order):
            self._order(act)
        elif self.asked:
            id = f"r{act.request % len(self.asked)}"
            name = self.asked[id]
            self.watches[name].disturbances += 1
            if isinstance(act, Withdraw):
                devices.post(name, CancelEvent(id))
            else:
                sim = devices.sims[name]
                at = max(devices.now, sim.clock.now())
                sim._heap.schedule(at, PauseEvent(id))
                sim._heap.schedule(at + act.seconds, ResumeEvent(id))

    def _ask(self, act: Ask) -> None:
        name = NAMES[act.device % len(self.devices.sims)]
        sim = self.devices.sims[name]
        model = self._name(act.model)
        spec = sim._specs.get(model)  # None: it has left
        if act.tuned and spec is not None and spec.adapters:
            model = spec.adapters[0].name
        for i in range(act.n):
            k = len(self.asked)
            at = max(self.devices.now, sim.clock.now()) + i * act.gap
            asked = submission(act, model, k, at)
            self.asked[asked.id] = name
            self.watches[name].asked[asked.id] = asked
            sim.submit(asked)

    def _name(self, index: int) -> str:
        return self._names[index % len(self._names)]

    def _order(self, act: Order) -> None:
        devices = self.devices
        name = NAMES[act.device % len(devices.sims)]
        if act.what == "part":
            devices.part()
            devices.go(2 * WAY + 1.0)
            devices.meet()
        for w in self.watches.values():
            w.disturbances += 1
            w.shrunk = True
        operation = self._operation(act, name)
        if operation is not None:
            devices.order(name, operation)

    def _operation(self, act: Order, name: str) -> LoopCommand | None:
        sim, model = self.devices.sims[name], self._name(act.model)
        if act.what == "evict":
            return EvictCommand(model)
        if act.what == "activate":
            return ActivateCommand(model)
        if act.what == "change":
            return Change(
                model=model,
                slo=Slo(ttft=0.1 * (act.amount % 5 + 1), tpot=0.1),
                priority=0,
                max_waiting=100,
                queue_seconds=None,
                share=float(act.amount),
                max_running=2 + act.amount % 7,
                pinned=act.amount % 2 == 1,
            )
        if act.what == "leave":
            self.watches[name].left.add(model)
            return Leave(model, at_once=act.amount % 2 == 1)
        if act.what == "join" and self._joiners:
            spec = self._joiners.pop()
            costs = COSTS.after(3e-4)
            newcomer = build_newcomer(sim.state, hosted_nowhere(spec), copy_nothing, costs)
            sim._loop.commands.ready[spec.name] = newcomer
            sim._specs[spec.name], sim._costs[spec.name] = spec, COSTS
            self._names.append(spec.name)
            return Join(spec.name)
        if act.what == "lend":
            return Lend(self.devices.other(name), act.amount)
        if act.what == "recall":
            return Recall(self.devices.other(name), act.amount, 1000.0)
        return None
