"""The story of a device: every event and every decision, in order, with its time.

A ring for display, and, where a `sink` is given, all that a replay needs, a turn at a time: how it
began, each event and what it brought to an end, each decision, each job.
"""

from __future__ import annotations

import dataclasses
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ballast.core.actions import Action, LoopCommand, Promise
from ballast.core.chains import Chain, digest
from ballast.core.entries import (
    ModelEntry,
    Sink,
    Snapshot,
    StoryEntry,
    describe,
    describe_action,
    describe_lease,
)
from ballast.core.event import (
    ArrivalEvent,
    CancelledOutput,
    Event,
    FailedOutput,
    FinishedOutput,
    Output,
    TokenOutput,
)
from ballast.core.job import Job
from ballast.core.lease import Lease
from ballast.core.migration import ImportKvEvent
from ballast.core.model import ModelSpec
from ballast.core.request import Request, Submission

_End = FinishedOutput | FailedOutput | CancelledOutput


class Story:
    """Keeps the last `keep` entries for display; hands `sink` each turn's, with all a replay needs.

    Used by the loop's thread; only `take` by another.
    """

    def __init__(
        self,
        keep: int = 2000,
        sink: Sink | None = None,
        *,
        key: bytes = b"",
        began: float = 0.0,
        overhead: float | None = None,
    ) -> None:
        """`key`: of the digests that stand for tokens; `began` and `overhead` as in `Snapshot`."""
        self.entries: deque[StoryEntry] = deque(maxlen=keep)
        self._untold: deque[StoryEntry] = deque(maxlen=keep)
        """Decisions, which would soon be lost among the events, until somebody takes them."""
        self._sink = sink
        self._key = key
        self.began, self.overhead = began, overhead
        self._turn: list[StoryEntry] = []
        """Told to nobody yet."""
        self._turns = 0
        self._last: StoryEntry = {}
        self._link = 0.0
        self._arrivals = 0
        self._open: dict[str, tuple[int, Chain | None]] = {}
        """By id, of open requests: number, and the blocks filled where prefixes are cached."""
        self._named: dict[str, tuple[str, int]] = {}
        """By what requests may ask for: whose prefixes it shares, and the tokens in a block."""
        self._prefixes = False
        """Whether any are cached."""

    @property
    def whole(self) -> bool:
        """Whether somebody gets all that a replay needs."""
        return self._sink is not None

    def begins(self, at: float, snapshot: Snapshot) -> None:
        """A device begins its life."""
        self._link = snapshot.link_bytes_per_second
        self._prefixes = snapshot.device.prefix_cache
        for m in snapshot.models:
            self._names(m.spec)
        self._tell({"at": at, "snapshot": snapshot})

    def event(self, at: float, event: Event) -> None:
        """Something happened."""
        told = {"at": at, **describe(event)}
        if self._sink is not None:
            told["turn"] = self._turns
            if isinstance(event, ArrivalEvent):
                self._arrives(told, event.submission)
            elif isinstance(event, ImportKvEvent):
                self._numbers(told, event.wanted)
        self._last = told
        self._tell(told)

    def joins(self, joining: ModelEntry) -> None:
        """The event told last lets a model in."""
        if self._sink is not None:
            self._last["joining"] = joining
            self._names(joining.spec)

    def lends(self, lease: Lease) -> None:
        """The event told last lends pages."""
        self._last |= describe_lease(lease)

    def vacated(self, at: float, home: int, dropped: int) -> None:
        """Slabs on borrowed pages that were asked back: put on pages of the device, or dropped."""
        self._tell({"at": at, "vacated": {"home": home, "dropped": dropped}})

    def said(self, outputs: Sequence[Output]) -> None:
        """The event told last has brought these."""
        if self._sink is None:
            return
        refused = self._last.pop("open_already", False)
        blocks: dict[str, bytes] = {}
        for output in outputs:
            if type(output) is TokenOutput:
                number, chain = self._open[output.request_id]
                if chain is not None and (full := chain.add(output.token)):
                    blocks[str(number)] = full
        if blocks:
            self._last["blocks"] = _in_base64(blocks)
        ended = self._ended(outputs, refused)
        if ended:
            self._last["ended"] = ended

    def ended(self, at: float, outputs: Sequence[Output]) -> None:
        """These came of decisions, or of the device's end."""
        if self._sink is None:
            return
        ended = self._ended(outputs)
        if ended:
            self._tell({"at": at, "ended": ended})

    def job(self, at: float, job: Job) -> None:
        """A job was started."""
        if self._sink is None:
            return
        prefill, decode = [], []
        for w in job.work:
            number = self._open[w.request_id][0]
            if len(w.tokens) == 1 and w.sample is not None:
                decode.append(number)
            else:
                prefill.append((number, w.start, len(w.tokens), w.sample is not None))
        told: StoryEntry = {"at": at, "job": job.id, "model": job.model}
        if job.parts is not None:
            told |= {"lane": job.lane, "parts": job.parts}
        if prefill:
            told["prefill"] = prefill
        if decode:
            told["decode"] = decode
        self._tell(told)

    def leap(
        self,
        at: float,
        job: Job,
        steps: int,
        lasts: Sequence[tuple[float, float | None]],
        moved: Iterable[Request],
        jobs: Sequence[Job] = (),
    ) -> None:
        """Steps that only decode have ended without turns of their own: `job`, and after it others
        like it. `lasts`: of each model's last one, in order, when it ended, and its seconds without
        those in which it waited for layers. They were of the requests `moved`.

        `jobs`: all of them, where their order does not follow from that; `lasts` is of each then.
        """
        told = {"event": "Leap", "job": job.id, "model": job.model, "steps": steps}
        told["decode_sequences"] = job.load.decode_sequences
        if self._sink is not None:
            ends, seconds = zip(*lasts, strict=True)
            told |= {"turn": self._turns, "ends": ends, "seconds": seconds}
            if jobs:
                told["jobs"] = [j.id for j in jobs]
                if job.parts is not None:
                    told["parts"] = [j.parts for j in jobs]
            blocks: dict[str, bytes] = {}
            for r in moved:
                number, chain = self._open[r.id]
                if chain is not None and (full := chain.push(r.tokens[chain.tokens :])):
                    blocks[str(number)] = full
            if blocks:
                told["blocks"] = _in_base64(blocks)
        self._tell({"at": at, **told})

    def link(self, at: float, bytes_per_second: float) -> None:
        """What policies are told of the link from now on."""
        if self._sink is not None and bytes_per_second != self._link:
            self._link = bytes_per_second
            told = {"at": at, "turn": self._turns, "link_bytes_per_second": bytes_per_second}
            self._tell(told)

    def decision(
        self, at: float, action: Action | LoopCommand, refused: str | None, by: str | None = None
    ) -> None:
        """A policy, or whom `by` names, asked for `action`; `refused` says why it was not done, if
        it was not."""
        told = {"at": at, "action": type(action).__name__, **describe_action(action)}
        if by is not None:
            told["by"] = by
        if refused is not None:
            told["refused"] = refused
        self._untold.append(told)
        self._tell(told)

    def promises(self, at: float, stated: Sequence[Promise]) -> None:
        """A policy has set these pages aside, and no others any more."""
        self._tell({"at": at, "promises": [dataclasses.asdict(p) for p in stated]})

    def stray(self, at: float, why: str) -> None:
        """Something happened that no replay can repeat."""
        self._tell({"at": at, "stray": why})

    def turned(self) -> None:
        """A turn is over."""
        self._turns += 1
        if self._turn and self._sink is not None:
            self._sink(self._turn)
            self._turn = []

    def ends(self, at: float, why: str, outputs: Sequence[Output]) -> None:
        """The device's life is over, as it should be; this is what it says last."""
        told: StoryEntry = {"at": at, "end": why}
        if self._sink is not None:
            told["turn"] = self._turns
            if outputs:
                told["ended"] = [
                    self._ends(output, False) for output in outputs if isinstance(output, _End)
                ]
        self._tell(told)
        self.turned()

    def take(self) -> tuple[StoryEntry, ...]:
        """The decisions since the last call, of which the oldest may be missing. By one thread,
        which may be another than the teller's."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._untold.popleft())
        return tuple(taken)

    def _tell(self, entry: StoryEntry) -> None:
        self.entries.append(entry)
        if self._sink is not None:
            self._turn.append(entry)

    # -- what only a replay needs -----------------------------------------------------------------

    def _names(self, spec: ModelSpec) -> None:
        for served in spec.served:
            self._named[served.name] = served.fingerprint, spec.block_tokens

    def _arrives(self, told: StoryEntry, s: Submission) -> None:
        """All else that the engine goes by."""
        chain = self._numbers(told, s)
        if s.id in self._open:
            told["open_already"] = True
            told.pop("blocks", None)
        else:
            self._open[s.id] = told["n"], chain
        told["arrival"] = s.arrival
        for name in ("open_ended", "priority", "prompt_logprobs", "embed"):
            value = getattr(s, name)
            if value or (value is not None and name == "prompt_logprobs"):
                told[name] = value
        if s.sampling.grammar:
            told["grammar"] = True
        if s.resumed is not None:
            told["resumed"] = len(s.resumed)
            if s.age:
                told["age"] = s.age
            if s.first_token_age is not None:
                told["first_token_age"] = s.first_token_age

    def _numbers(self, told: StoryEntry, s: Submission) -> Chain | None:
        """Number a sequence of tokens; the blocks that it fills, where prefixes are cached."""
        told["n"] = self._arrivals
        self._arrivals += 1
        if s.salt:
            told["salt"] = digest(self._key, s.salt.encode()).hex()
        if not self._prefixes or s.model not in self._named:
            return None
        fingerprint, size = self._named[s.model]
        chain = Chain(self._key, f"{fingerprint}:{s.salt}", size)
        full = chain.push(s.prompt) + chain.push(s.resumed or ())
        if full:
            told["blocks"] = b64encode(full).decode()
        return chain

    def _ended(self, outputs: Sequence[Output], refused: bool = False) -> list[StoryEntry]:
        return [
            self._ends(output, refused)
            for output in outputs
            if type(output) is not TokenOutput and isinstance(output, _End)
        ]

    def _ends(self, output: _End, refused: bool) -> StoryEntry:
        """`refused`: it was the second of its name, and the first stays open."""
        told: StoryEntry = {"request": output.request_id}
        if not refused:
            told["n"] = self._open.pop(output.request_id)[0]
        if isinstance(output, FinishedOutput):
            told |= {
                "finished": output.reason,
                "output_tokens": output.output_tokens,
                "cached_tokens": output.cached_tokens,
                "preemptions": output.preemptions,
            }
        else:
            # Not its reason, which may speak of tokens.
            told["failed"] = output.code if isinstance(output, FailedOutput) else "cancelled"
        return told


def _in_base64(blocks: dict[str, bytes]) -> dict[str, str]:
    return {number: b64encode(full).decode() for number, full in blocks.items()}
