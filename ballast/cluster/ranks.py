"""A tensor-parallel group as its first rank has it: a machine whose memory, link and models are
those of several processes.

::

    worker = rank 0: loop, pool, policies ── memory ──> rank 1, 2, ..: no loop, no pool
                                          ── models ──>
                                          ── jobs ────>
                                          <── events ──

A rank's death is the group's: the first one ends itself, the others end with it, and its controller
starts a worker anew, as after any crash.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ballast.cluster.remote import RemoteRank
from ballast.cluster.remote_vm import RemoteVm
from ballast.core.clock import Clock
from ballast.core.errors import BallastError, BrokenPromise, ConfigError, DeviceError
from ballast.core.event import Event
from ballast.core.job import SequenceWork
from ballast.core.link import LinkRates
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings, ModelSettings
from ballast.engine.machine import OnCpu
from ballast.kernels.workspace import Workspace
from ballast.kv.blocks import KvCache
from ballast.kv.swapper import MakeSwapper
from ballast.memory.copies import Copy, copy_now
from ballast.memory.link_group import GroupLink, share_of
from ballast.memory.transfer import HostLink
from ballast.memory.vm_group import GroupVm
from ballast.memory.vm_memfd import MemfdVm
from ballast.models.gloo import GlooExchange
from ballast.models.parallel import Exchange, ParallelModel
from ballast.models.served import Served
from ballast.models.shared import SharedExchange
from ballast.transport.ranks import (
    Allow,
    Carry,
    Compute,
    CopyNow,
    JoinGroup,
    Load,
    Loaded,
    Serve,
    Unload,
)
from ballast.weights.checkpoint import THREADS, load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.rotor import MakeRotor
from ballast.weights.sharding import Shard

log = logging.getLogger(__name__)

EXIT_CODE = 3
"""Of a first rank that has lost another."""
_SAMPLED = Sampling()
"""Stands for any: a rank needs to know that there is something to sample, and no more."""


def of_one_rank(device: DeviceSettings) -> DeviceSettings:
    """A rank's equal part of what the device has. Raises ConfigError."""
    ranks = device.tensor_parallel
    if device.lanes > 1:
        allowed = "one lane: ranks meet in the order of jobs, of which there is one at a time"
        raise ConfigError(f"lanes of {device.name}", device.lanes, allowed)
    threads = device.threads or len(os.sched_getaffinity(0))
    budget = device.budget_bytes // ranks
    if budget < device.page_bytes:
        raise ConfigError(f"the budget of {device.name}", device.budget_bytes, "a page each")
    return replace(device, budget_bytes=budget, threads=max(1, threads // ranks))


class GroupMachine(OnCpu):
    """Implements `ballast.engine.machine.Machine` over the processes of all ranks."""

    def __init__(
        self,
        device: DeviceSettings,
        link: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
        others: Sequence[RemoteRank],
    ) -> None:
        """`device`: of one rank; `link`: the pace of all. Returns when all ranks are there."""
        self.device = device
        self._closing = False
        ranks = device.tensor_parallel
        n_pages = device.budget_bytes // device.page_bytes
        pace = None if link is None else share_of(link, ranks)
        self._ranks = others
        for other in others:
            other.listen(lambda done: self.link.landed(done), self._lost)
        with ExitStack() as stack:
            file = shared = None
            if device.exchange == "gloo":
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-"))
                file = Path(made) / "meeting"
            else:
                shared = os.memfd_create("ballast-meeting")
                stack.callback(os.close, shared)
            for other in self._ranks:
                other.memory.tell(
                    JoinGroup(
                        None if file is None else str(file),
                        other.rank,
                        ranks,
                        device.page_bytes,
                        n_pages,
                        device.threads or 1,
                        device.step_tokens,
                        device.step_logits,
                        pace,
                    )
                )
                if shared is not None:
                    other.memory.give(shared)
            first = Shard(0, ranks)
            self._exchange: Exchange
            if file is not None:
                self._exchange = GlooExchange(file, first)
            elif shared is not None:
                self._exchange = SharedExchange(shared, first, n_pages * device.page_bytes)
            for other in self._ranks:
                other.memory.answer()
        own = MemfdVm(device.page_bytes, n_pages)
        self.vm = GroupVm(
            own, [RemoteVm(r.memory, device.page_bytes, n_pages) for r in self._ranks]
        )
        own_link = HostLink(clock, lambda done: self.link.landed(done), pace)
        self.link = GroupLink(own_link, post, self._carry, ranks)
        self._hosts: dict[int, tuple[int, ...]] = {}
        """By the address of a segment in this process: where the others have theirs."""

    # -- models -----------------------------------------------------------------------------------

    def load(self, settings: ModelSettings, tier: HostTier, threads: int = THREADS) -> HostModel:
        """All ranks read their parts at the same time; where one cannot, none has the model."""
        shard = Shard(0, self.device.tensor_parallel)
        host: HostModel | None = None
        failed: BallastError | None = None
        for other in self._ranks:
            other.models.tell(Load(settings, threads))
        try:
            host = load_host_model(settings, tier, threads, shard)
        except BallastError as error:
            failed = error
        found: list[tuple[int, ...]] = []
        loaded: list[RemoteRank] = []
        for other in self._ranks:
            try:
                told = other.models.answer()
            except DeviceError as error:
                failed = failed or DeviceError(f"rank {other.rank}", error.reason)
                continue
            assert isinstance(told, Loaded)
            loaded.append(other)
            found.append(told.addresses)
        if failed is not None or host is None:
            for other in loaded:
                other.models.ask(Unload(settings.name))
            if host is not None:
                host.close()
            raise failed or BrokenPromise(f"{settings.name} was not loaded")
        for i, address in enumerate(host.addresses):
            self._hosts[address] = tuple(addresses[i] for addresses in found)
        return host

    def unload(self, host: HostModel) -> None:
        if not self._closing:
            for other in self._ranks:
                other.models.ask(Unload(host.spec.name))
        host.close()

    def executors(
        self,
        host: HostModel,
        segments: Sequence[int],
        kv: KvCache,
        workspaces: Sequence[Workspace],
    ) -> tuple[Served, ...]:
        places = [self.vm.where(address) for address in (*segments, kv.base)]
        for i, other in enumerate(self._ranks, 1):
            *theirs, their_kv = (place[i] for place in places)
            other.models.ask(Serve(host.spec.name, tuple(theirs), their_kv))
        rows, sampled = self.device.step_tokens, self.device.step_logits
        (workspace,) = workspaces
        where = (segments, kv.base, kv.layout, workspace, rows, sampled)
        return (ParallelModel(host, *where, exchange=self._exchange, followers=self),)

    def make_rotor(self, clock: Clock, post: Callable[[Event], None]) -> MakeRotor | None:
        """Layers do not rotate on groups yet."""
        return None

    def make_swapper(self, clock: Clock, dirty: bool) -> MakeSwapper | None:
        """KV is not swapped on groups yet."""
        return None

    def allow(self, n_bytes: int) -> None:
        for other in self._ranks:
            other.models.ask(Allow(n_bytes))

    def copy(self, dst: int, src: int, n_bytes: int) -> None:
        targets, sources = self.vm.where(dst), self.vm.where(src)
        for i, other in enumerate(self._ranks, 1):
            other.memory.ask(CopyNow(targets[i], sources[i], n_bytes))
        copy_now(dst, src, n_bytes)

    def close(self) -> None:
        """The other ranks end, and what they have with them."""
        self._closing = True
        for other in self._ranks:
            other.close()
        self._exchange.close()

    # -- jobs, on the lane ------------------------------------------------------------------------

    def begin(self, model: str, work: Sequence[SequenceWork], *, head: bool) -> None:
        told = Compute(model, tuple(_without_words(w) for w in work), head)
        for other in self._ranks:
            other.jobs.tell(told)

    def end(self) -> None:
        for other in self._ranks:
            other.jobs.answer()

    def broken(self, error: BaseException) -> NoReturn:
        self._end(f"a job broke off: {type(error).__name__}: {error}")

    # -- transfers --------------------------------------------------------------------------------

    def _carry(self, transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        """Have the other ranks begin their parts of a transfer."""
        places = [(self.vm.where(c.dst), self._hosts[c.src], c.n_bytes) for c in copies]
        for i, other in enumerate(self._ranks):
            theirs = [(to[1 + i], source[i], n) for to, source, n in places]
            other.memory.ask(Carry(transfer_id, theirs, stream))

    # -- deaths -----------------------------------------------------------------------------------

    def _lost(self, other: RemoteRank) -> None:
        if not self._closing:
            self._end(f"rank {other.rank} is gone ({other.epitaph()})")

    def _end(self, why: str) -> NoReturn:
        """A group that is not whole can compute nothing: this process ends, and all with it."""
        log.critical("%s: the group ends: %s", self.device.name, why)
        logging.shutdown()
        os._exit(EXIT_CODE)


def _without_words(work: SequenceWork) -> SequenceWork:
    """What only whoever samples needs stays here."""
    sample = None if work.sample is None else _SAMPLED
    return replace(work, sample=sample, history=None, prompt_tokens=0)
