"""Reconstruct the events of a recorded story for the device that replays it.

Used by `sim.replay`. Tokens and bytes, which a story does not hold, are replaced by stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import msgspec

from ballast.core import actions, event, kv_tiers, lease, migration
from ballast.core.entries import EVENT_TAGS, ModelEntry, StoryEntry, action_tag
from ballast.core.event import (
    EmbeddingOutput,
    Event,
    FailedOutput,
    JobDoneEvent,
    JobResult,
    PromptScoresOutput,
)
from ballast.core.fleet_state import OPERATOR
from ballast.core.job import Job, SampledToken
from ballast.core.lease import Lease, LendingMessage, PeerMetEvent
from ballast.core.model import ModelSpec
from ballast.core.request import Request, Sampling, Submission
from ballast.core.rotation import Rotation
from ballast.engine.build import build_newcomer
from ballast.engine.kv_tiers import BlockToStore
from ballast.engine.loop import Loop
from ballast.kv.blocks import KvCache
from ballast.kv.staged import BlockMoves
from ballast.memory.copies import Copy
from ballast.memory.vm import Exported
from ballast.residency.arrival import ArrivalPlan
from ballast.sim.no_bytes import copy_nothing, hosted_nowhere
from ballast.sim.stand_in_tokens import StandInTokens
from ballast.sim.story_reader import DeviceStory
from ballast.weights.weight_stream import Loads

T = TypeVar("T")


class Impossible(Exception):
    """The story has an event that cannot happen in the replay."""


class Unknown(Exception):
    """The story has an entry of a kind that this version does not support."""


class StoryLanes:
    """Runner of a replay: jobs end at the recorded events."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        """In flight, by id."""

    def start(self, job: Job) -> None:
        self.jobs[job.id] = job


class StoryStream:
    """Implements `ModelStream` for a replay: layers land at the recorded events."""

    def __init__(self, spec: ModelSpec) -> None:
        self.loads = Loads()
        self.held: Sequence[int] = ()

    def settle(self) -> None:
        """Do nothing: the story has the event at which no layer is in transfer."""

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        self.held = rotation.first

    def forget(self) -> None:
        self.held = ()

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Return False: the story has the event at which a job may begin early."""
        return False

    def add_weights(self, copies: Sequence[Copy]) -> None:
        """There are no bytes."""

    def add_staging(self, kv: KvCache) -> None:
        """There are no bytes."""

    def carry_blocks(self, moves: BlockMoves) -> None:
        """There are no bytes."""


class StoryGrammars:
    """Implements `GrammarStore` for a replay: the story has the events `GrammarReady`."""

    def prepare(self, request: Request) -> None:
        """The event is in the story."""

    def release(self, request: Request) -> None:
        """There is none."""


class StoryKvBytes:
    """Implements `KvBytes` for a replay: the story has the events `KvRead`."""

    def start(
        self,
        request_id: str,
        source: str,
        pieces: Sequence[migration.Piece],
        targets: Sequence[tuple[int, int]],
        attempt: int,
    ) -> None:
        """There are no bytes."""

    def stop(self, request_id: str) -> None:
        """None are written."""

    def load(self, address: int, n_bytes: int) -> bytes:
        return b""

    def store(self, address: int, data: bytes) -> None:
        """None are written."""

    def close(self) -> None:
        """None are written."""


class StoryKvTiers:
    """Implements `KvTierCopies` for a replay: the story has its events."""

    def look_up(self, request_id: str, attempt: int, model: str, names: Sequence[bytes]) -> None:
        """The event is in the story."""

    def fetch(
        self,
        request_id: str,
        attempt: int,
        model: str,
        names: Sequence[bytes],
        targets: Sequence[tuple[int, int]],
    ) -> None:
        """The event is in the story."""

    def stop(self, request_id: str) -> None:
        """There are no bytes."""

    def store(self, owner: str, blocks: Sequence[BlockToStore]) -> None:
        """There are no bytes."""

    def void(self, owner: str, block: int) -> None:
        """There are no bytes."""

    def occupy(self, n_bytes: int) -> None:
        """There are no bytes."""

    def close(self) -> None:
        """There are no bytes."""


class StoryEvents:
    """Made from a life's entries, in order, for a device that has come as far as they have."""

    def __init__(self, life: DeviceStory, lanes: StoryLanes, loop: Loop) -> None:
        self._lanes = lanes
        self._state = loop.state
        self._lent: dict[int, tuple[int, ...]] = {}
        """By lease, the pages that were lent."""
        self._lent_again: dict[int, tuple[int, ...]] = {}
        """Those that the replay has lent instead."""
        loop.state.lending.send = self._hear
        loop.state.grammars = StoryGrammars()
        loop.state.migration.bytes = StoryKvBytes()
        loop.state.tiers.copies = StoryKvTiers() if life.snapshot.tiers else None
        self._ready = loop.commands.ready
        self._standins = StandInTokens(life.entries)
        self._numbers: dict[str, int] = {}
        """Number of the last request with each id."""
        self._specs: dict[str, ModelSpec] = {}
        """Spec of the model that runs each name (model or adapter)."""
        for m in life.snapshot.models:
            self._serves(m.spec)

    def _serves(self, spec: ModelSpec) -> None:
        self._specs |= dict.fromkeys((served.name for served in spec.served), spec)

    def of(self, entry: StoryEntry) -> Event:
        """Return the event of an entry. Raises Impossible and Unknown."""
        kind = entry["event"]
        if kind == "Arrival":
            return event.ArrivalEvent(self._submission(entry))
        if kind == "KvTail":
            attempt = entry.get("attempt", 0)
            return migration.KvTailEvent(entry["request_id"], entry["tokens"], b"", attempt)
        if kind == "ImportKv":
            return self._import(entry)
        if kind == "JobDone":
            job, stall = self.ended_job(entry), entry.get("stall", 0.0)
            done = self.job_done(job, entry["seconds"], _ends(entry), stall)
            return replace(done, carried=tuple(entry.get("carried", (0.0, 0.0))))
        if kind == "JobFailed":
            return event.JobFailedEvent(self.ended_job(entry), entry["reason"])
        if kind == "Operate":
            return self._operate(entry)
        if kind in _OF_LEASES:
            return self._of_lease(entry)
        if kind == "PeerMet":
            return self._met(entry)
        if kind in ("TransferDone", "FirstJobReady"):
            number = entry["transfer_id"]
            if all(m.life.transfer_id != number for m in self._state.models.values()):
                raise Impossible("no such transfer is on its way")
        made = _EVENTS.get(kind)
        if made is None:
            raise Unknown(f"this version knows no event {kind!r}")
        return _made(made, entry)

    def _hear(self, word: LendingMessage) -> None:
        """Record the pages that the replay lends to other devices."""
        if isinstance(word, lease.PagesLentEvent):
            self._lent_again[word.lease.id] = word.lease.pages

    def _of_lease(self, entry: StoryEntry) -> Event:
        """Rebuild an event of a lease with the replay's pages in place of the recorded ones."""
        id, pages = entry["lease"], entry["page_numbers"]
        if entry["event"] == "Returned":
            instead = dict(zip(self._lent.get(id, ()), self._lent_again.get(id, ()), strict=True))
            if not instead.keys() >= set(pages):
                raise Impossible(f"lease {id} has not lent these pages")
            pages = [instead[page] for page in pages]
        made = Lease(id, entry["epoch"], entry["lender"], entry["borrower"], tuple(pages))
        return _OF_LEASES[entry["event"]](made)

    def _met(self, entry: StoryEntry) -> Event:
        """A peer without memory."""
        met = _made(PeerMetEvent, entry)
        page_bytes = self._state.settings.page_bytes
        exported = Exported((-2, met.epoch), page_bytes, met.n_pages, (), None)
        self._state.lending.exports[met.peer, met.epoch] = exported
        return met

    def _submission(self, entry: StoryEntry) -> Submission:
        n, name, prompt = entry["n"], entry["model"], entry["prompt_tokens"]
        how = _ends(entry).get(entry["request"])
        if how is None or "n" in how:  # else it is the second of its name, and refused
            self._numbers[entry["request"]] = n
        spec = self._specs.get(name)
        resumed = entry.get("resumed")
        end = prompt + (resumed or 0)
        tokens = (0,) * end if spec is None else self._standins.tokens(spec, n, 0, end)
        how = how or {}
        if spec is not None and how.get("failed") == "invalid_request" and prompt:
            tokens = (spec.vocab, *tokens[1:])  # one that the model did not have
        return Submission(
            id=entry["request"],
            model=name,
            prompt=tokens[:prompt],
            max_tokens=entry["max_tokens"],
            open_ended=entry.get("open_ended", False),
            # Which one it is decides nothing here.
            sampling=Sampling(grammar="one") if entry.get("grammar") else Sampling(),
            arrival=entry["arrival"],
            priority=entry.get("priority", 0),
            stop_token_ids=tokens[-1:] if how.get("finished") == "stop" else (),
            ignore_eos=True,
            salt=entry.get("salt", ""),
            tenant=entry.get("tenant", ""),
            prompt_logprobs=entry.get("prompt_logprobs"),
            embed=entry.get("embed", False),
            resumed=None if resumed is None else tokens[prompt:],
            age=entry.get("age", 0.0),
            first_token_age=entry.get("first_token_age"),
        )

    def _import(self, entry: StoryEntry) -> Event:
        """Return the import of a prefix that fills the recorded blocks, whatever its source."""
        n, name = entry["n"], entry["model"]
        spec = self._specs.get(name)
        end = entry["prompt_tokens"]
        tokens = (0,) * end if spec is None else self._standins.tokens(spec, n, 0, end)
        wanted = Submission(
            id=entry["request"], model=name, prompt=tokens, max_tokens=0, salt=entry.get("salt", "")
        )
        return migration.ImportKvEvent(wanted, entry["form"], "", (), entry.get("attempt", 0))

    def ended_job(self, entry: StoryEntry) -> Job:
        job = self._lanes.jobs.get(entry["job"])
        if job is None or job.model != entry["model"]:
            flying = (f"job {job.id} of {job.model}" for job in self._lanes.jobs.values())
            raise Impossible(f"{', '.join(flying) or 'no job'} is in flight")
        return self._lanes.jobs.pop(job.id)

    def job_done(
        self, job: Job, seconds: float, ends: Mapping[str, StoryEntry], stall: float = 0.0
    ) -> JobDoneEvent:
        """In the order in which live models tell results."""
        spec = self._specs[job.model]
        results: list[JobResult] = [EmbeddingOutput(w.request_id, b"") for w in job.work if w.embed]
        for w in job.work:
            if w.scoring is not None:
                scores = (0.0,) * len(w.scoring.targets)
                results.append(PromptScoresOutput(w.request_id, w.scoring.start, scores))
        for w in job.work:
            how = ends.get(w.request_id, {})
            failed = how.get("failed", "cancelled")
            if w.sample is not None and failed != "cancelled":
                results.append(FailedOutput(w.request_id, failed, ""))
            elif w.sample is not None:
                n = self._numbers[w.request_id]
                (token,) = self._standins.tokens(spec, n, w.end, w.end + 1)
                stop = how.get("finished") == "stop"
                results.append(SampledToken(w.request_id, token, ends=stop))
        return JobDoneEvent(job, tuple(results), seconds, stall)

    def _operate(self, entry: StoryEntry) -> Event:
        made = _OPERATIONS.get(entry["operation"])
        if made is None:
            raise Unknown(f"this version knows no operation {entry['operation']!r}")
        operation = _made(made, entry)
        if "lease" in entry:
            self._lent[entry["lease"]] = tuple(entry["page_numbers"])
        if "joining" in entry:
            joining = msgspec.convert(entry["joining"], ModelEntry)
            spec, costs = joining.spec, joining.measured
            newcomer = build_newcomer(self._state, hosted_nowhere(spec), copy_nothing, costs)
            self._ready[spec.name] = newcomer
            self._serves(spec)
        return event.CommandEvent(entry["id"], operation, entry.get("by", OPERATOR))


def _made(kind: type[T], entry: StoryEntry) -> T:
    """Build an event or a command from its recorded fields."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return msgspec.convert({k: v for k, v in entry.items() if k in names}, kind)


def _ends(entry: StoryEntry) -> dict[str, StoryEntry]:
    """Requests that an event ended."""
    return {ended["request"]: ended for ended in entry.get("ended", ())}


_EVENTS: dict[str, type[Event]] = {
    EVENT_TAGS[kind]: kind
    for kind in (
        event.CancelEvent,
        event.PauseEvent,
        event.ResumeEvent,
        event.GrammarReadyEvent,
        event.TransferDoneEvent,
        event.FirstJobReadyEvent,
        event.RotationSettledEvent,
        event.DrainEvent,
        event.StopEvent,
        lease.PeerGoneEvent,
        migration.ExportKvEvent,
        migration.DepartEvent,
        migration.KvReadEvent,
        migration.DropKvEvent,
        kv_tiers.KvFoundEvent,
        kv_tiers.KvFetchedEvent,
    )
}
_OF_LEASES: dict[str, Callable[[Lease], Event]] = {
    EVENT_TAGS[kind]: kind
    for kind in (lease.PagesLentEvent, lease.PagesRecalledEvent, lease.PagesReturnedEvent)
}
_OPERATIONS: dict[str, type[actions.LoopCommand]] = {
    action_tag(kind): kind
    for kind in (
        actions.ActivateCommand,
        actions.EvictCommand,
        actions.Change,
        actions.Join,
        actions.Leave,
        actions.Lend,
        actions.Recall,
        actions.ReleaseMemory,
        actions.ScrubKv,
    )
}
