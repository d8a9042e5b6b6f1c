"""Hold the state of one device: models, requests, memory, lanes, promises and leases.

The loop owns it; other threads only read it for reports. It changes through `ballast.engine.events`
(events) and `ballast.engine.apply` (policies' actions), live and in virtual time alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ballast.core.change_counter import ChangeCounter
from ballast.core.clock import Clock
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    FailedOutput,
    Output,
)
from ballast.core.model import kv_room
from ballast.core.price_curve import PriceCurve
from ballast.core.request import Request, RequestState
from ballast.core.settings import DeviceSettings
from ballast.core.view import Residency
from ballast.engine.activation_rate import ActivationRate
from ballast.engine.kv_tiers import KvTiers
from ballast.engine.lanes import Lanes
from ballast.engine.layer_stream import MakeStream
from ballast.engine.lending import Lending
from ballast.engine.migration import Migration
from ballast.engine.model import ModelState
from ballast.engine.promises import Promises
from ballast.engine.queue_deadlines import QueueDeadlines
from ballast.memory.arena import Arena
from ballast.memory.pool import Pool
from ballast.memory.transfer import Link
from ballast.weights.shared import SharedSegment


class GrammarStore(Protocol):
    """Grammars of open requests; `ballast.live.grammar_compiler` implements it."""

    def prepare(self, request: Request) -> None:
        """Begin to compile a request's grammar; the event `GrammarReady` ends its wait."""

    def release(self, request: Request) -> None:
        """Release the grammar of a request that has ended, compiled or not."""


class DeviceState:
    """State of one device. It holds the mechanisms too: pool, KV caches, weights, link."""

    prices: PriceCurve | None = None
    """Marginal prices of its pages, as published last (`MemoryDecider.publish`)."""

    def __init__(
        self,
        settings: DeviceSettings,
        models: list[ModelState],
        pool: Pool,
        arena: Arena,
        graphs: Arena,
        link: Link,
        clock: Clock,
        lending: Lending,
        make_stream: MakeStream | None = None,
        stages_kv: bool = False,
    ) -> None:
        self.settings = settings
        self.models: dict[str, ModelState] = {}
        """Models by name. The dict is replaced, never changed: other threads read it."""
        self.named: dict[str, tuple[ModelState, int | None]] = {}
        """Names that requests may use: (model, None), or (base model, index) for an adapter."""
        self.shared: tuple[SharedSegment, ...] = ()
        """Segments that several models contain or have contained."""
        self.clock = clock
        self.now = clock.now()
        """Time of the loop's present or last turn. It and `link_bytes_per_second` are read once a
        turn and recorded in the story, so that replay of the story gives the same results."""
        self.news = ChangeCounter()
        """Counts changes after which a policy should decide again; shared by all parts."""
        self.asked = -1
        """`news` when a policy was asked last; -1: none was."""
        self.tiers = KvTiers(lambda: self.link_bytes_per_second)
        self.pool = pool
        self._weights_in_place = False
        for m in models:
            self.enrol(m)
        self.promises = Promises(pool, self.news)
        self.lending = lending
        lending.news = self.news
        self.migration = Migration()
        self.link = link
        self.make_stream, self.stages_kv = make_stream, stages_kv
        """What makes streams of models that join, and whether blocks of KV can be staged."""
        self.activating: Callable[[str], object] = lambda model: None
        """Called with a model's name when the transfer of its weights has begun."""
        self.grammars: GrammarStore | None = None
        """Compiles grammars; None: grammars have no effect, since no tokens are sampled, as in
        virtual time."""
        self.link_bytes_per_second = link.bytes_per_second
        self.activation_rate = ActivationRate()
        self.arena, self.graphs = arena, graphs
        self.requests: dict[str, Request] = {}
        self.queue_deadlines = QueueDeadlines(self.requests)
        self.lanes = Lanes(settings)
        self.draining = False
        self.stopped: str | None = None
        self.jobs = 0
        self._sequence = 0
        self._transfers = 0

    # -- models ---------------------------------------------------------------------------------

    def enrol(self, m: ModelState) -> None:
        """Add a model to the device."""
        m.traffic = m.traffic.restarted(self.now)
        m.report_to(self.news)
        self.tiers.watch(m)
        self.news.n += 1
        self.models = {**self.models, m.spec.name: m}
        self.named[m.spec.name] = m, None
        for i, adapter in enumerate(m.spec.adapters):
            self.named[adapter.name] = m, i
        self._list_shared()

    def keep_promises(self, m: ModelState) -> None:
        """Have the pool keep what the model's `guarantee` says, and its KV stay within its
        `limit`. Segments that other models contain as well are nobody's alone."""
        page, in_place = self.settings.page_bytes, self._weights_in_place
        floor = m.spec.guaranteed_kv(page, in_place)
        m.kv.bounds.keep_between(floor, m.spec.most_kv(page))
        self.pool.guarantee(m.kv.owner, floor)
        own = 0 if in_place or not m.spec.guarantee else m.weights.own_pages
        self.pool.guarantee(m.weights.owner, own)

    @property
    def weights_in_place(self) -> bool:
        """Whether the preset leaves all weights in host memory, and so all pages to KV."""
        return self._weights_in_place

    @weights_in_place.setter
    def weights_in_place(self, in_place: bool) -> None:
        self._weights_in_place = in_place
        for m in self.models.values():
            self.keep_promises(m)

    def stop_accepting(self, m: ModelState) -> None:
        """Accept no more requests for a model and its adapters: it will leave the device."""
        m.life.leave()
        self.named = {name: found for name, found in self.named.items() if found[0] is not m}

    def remove_model(self, m: ModelState) -> None:
        """Remove a leaving model with its memory and addresses. It must have no requests, no job
        and no load in flight."""
        m.life.remove()
        self.migration.forget(m)
        for owner in (m.kv.owner, m.weights.owner):
            self.pool.guarantee(owner, 0)
        m.kv.close()
        m.weights.close()
        self.models = {name: other for name, other in self.models.items() if other is not m}
        self._list_shared()

    def _list_shared(self) -> None:
        models = self.models.values()
        self.shared = tuple(dict.fromkeys(s for m in models for s in m.weights.shared))
        for m in models:
            self.keep_promises(m)

    # -- memory -----------------------------------------------------------------------------------

    @property
    def freed(self) -> int:
        """Counter that grows when pages or blocks become free: a refused admission is retried."""
        return self.pool.freed.n

    @property
    def set_aside(self) -> int:
        """Pages set aside for activations and graphs, not for weights or KV."""
        return self.arena.pages + self.graphs.pages

    def room(self, m: ModelState) -> int:
        """Return the pages of KV that one request of `m` could have alone on the device.

        Lent pages count: they are recalled where requests lack pages."""
        here = () if self.weights_in_place else self.models.values()
        there = [o.spec for o in here if o.spec.pinned or o is m]
        pages = self.pool.total - self.set_aside
        pages -= sum(o.kv.bounds.floor for o in self.models.values() if o is not m)
        return kv_room(pages, there, self.settings.page_bytes, m.kv.bounds.most)

    # -- what happens to requests ---------------------------------------------------------------

    def remember(self, m: ModelState, request: Request) -> None:
        """Add a request's full blocks to the prefix cache."""
        tenant = request.submission.tenant
        named = m.kv.remember(
            request.tokens, request.blocks, request.computed, request.salt, tenant
        )
        if named:
            self.tiers.store(m, request, named)

    def end(self, request: Request, state: RequestState, output: Output) -> Output:
        """End a request in `state`: free its blocks and forget it. Returns `output`."""
        m = self.models[request.model]
        self.withdraw(m, request)
        request.to(state)
        if request.submission.sampling.grammar and self.grammars is not None:
            self.grammars.release(request)
        del self.requests[request.id]
        self.migration.ended(request.id)
        self.tiers.forget(request)
        m.last_used = self.now
        return output

    def fail_all(
        self, m: ModelState, code: str, reason: str, name: str | None = None
    ) -> list[Output]:
        """End every request of a model with an error; `name`: those for the model or its adapter
        of this name alone."""
        return [
            self.end(r, RequestState.FAILED, FailedOutput(r.id, code, reason))
            for r in [*m.running, *m.waiting, *m.paused.values()]
            if name is None or r.submission.model == name
        ]

    def fail(self, request: Request, code: str, reason: str) -> Output:
        """End one request, not in flight, with an error."""
        return self.end(request, RequestState.FAILED, FailedOutput(request.id, code, reason))

    @staticmethod
    def _forget_shortage(m: ModelState, request: Request) -> None:
        if m.shortages:
            m.shortages = tuple(s for s in m.shortages if s.request_id != request.id)

    def release(self, m: ModelState, request: Request, *, surrender: bool = False) -> None:
        """Free a request's blocks; `surrender`: drop cached prefixes too where that frees pages."""
        self.tiers.stop(request)
        if request.blocks:
            m.kv.free(request.blocks, surrender=surrender)
            request.blocks = []
        request.computed = 0

    def withdraw(self, m: ModelState, request: Request, *, surrender: bool = False) -> None:
        """Remove a request from the queue, the batch or the paused ones, and `release` its
        blocks."""
        if request.state is RequestState.PAUSED:
            m.paused.remove(request)
        elif request.state is RequestState.RUNNING:
            m.running.remove(request)
            if not m.running:
                m.stage_to, m.stage_order = None, ()
        else:
            m.waiting.remove(request)
        self.release(m, request, surrender=surrender)
        self._forget_shortage(m, request)
        if m.blocked is not None and m.blocked[0] == request.id:
            m.blocked = None  # the shortage that goes with it has just been forgotten

    def preempt(self, m: ModelState, request: Request, *, keeps_kv: bool = False) -> None:
        """Preempt a request: free its blocks and queue it again; its KV will be recomputed.

        `keeps_kv`: its full blocks stay as a cached prefix, from which it goes on; it counts as
        preempted only if they are gone when it does."""
        request.kept = keeps_kv
        if keeps_kv:
            self.remember(m, request)
        else:
            m.lost_kv(request)
        self.withdraw(m, request, surrender=not keeps_kv)
        request.to(RequestState.WAITING)
        m.waiting.add(request)
        self.tiers.look_up(m, request)

    def evict(self, m: ModelState) -> None:
        """Carry out an ordered eviction: free weights of a model, and preempt its requests; if
        part of the weights stays, so does their KV.

        No job of the model may be in flight."""
        for request in list(m.running):
            self.preempt(m, request, keeps_kv=not m.weights.leaves_whole)
        m.shortages = ()
        m.blocked = None
        self.free(m)
        m.life.evict()
        m.evictions += 1

    def free(self, m: ModelState) -> None:
        """Free the weights whose eviction is ordered, of a model that runs no request; with the
        last of them, its KV."""
        if m.weights.leaves_whole:
            self.migration.forget(m)
            m.kv.clear()
        m.weights.evict()

    def fail_load(self, m: ModelState, error: str) -> list[Output]:
        """Fail a model whose weights could not be loaded, with all its requests; return outputs.

        No job of the model may be in flight."""
        m.weights.evict()
        m.life.fail()
        reason = f"the weights of {m.spec.name!r} could not be brought in: {error}"
        return self.fail_all(m, "model_failed", reason)

    def next_transfer(self) -> int:
        """Return a new number for a transfer, unique on this device."""
        self._transfers += 1
        return self._transfers

    # -- what the loop goes by --------------------------------------------------------------------

    @property
    def asking(self) -> bool:
        """Whether news has come since a policy was asked last."""
        return self.news.n != self.asked

    @property
    def in_flight(self) -> bool:
        """Whether a job or transfer is in flight, so that an event will come without clients."""
        return (
            self.lanes.busy
            or self.tiers.awaiting
            or any(m.life.awaited or m.weights.promotion.awaited for m in self.models.values())
        )

    @property
    def over(self) -> bool:
        """Whether the loop may end."""
        if self.stopped is not None:
            return not self.lanes.busy
        return self.draining and not self.requests and not self.in_flight

    # -- checks -----------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raises BrokenPromise unless lives, memory and counts of the models agree. To be called
        between two turns."""
        self.pool.validate()
        self.lending.validate()
        for m in self.models.values():
            m.life.validate()
            m.weights.validate()
            m.kv.validate([*(r.blocks for r in m.running), *self.migration.tables(m)])
            here = m.residency not in (Residency.ABSENT, Residency.FAILED)
            failed = m.residency is Residency.FAILED and not m.weights.plan.empty
            if m.weights.backed != here or failed:
                raise BrokenPromise(f"{m.life}: the pages of its weights say otherwise")
            if (m.job is not None) != any(r.in_flight for r in m.running):
                raise BrokenPromise(f"{m.life}: requests are in flight with their job, or not")
