"""A device that follows the worker's protocol without a model: it repeats the prompt.

Run as a script, it is a worker process with such a device. What a request does is chosen by its
seed, so that tests need no timing: see `HOLD` and those after it. Log-probabilities are -0.5, and
alternative `k` is the token's id plus k, at k less; of a prompt's token i, -i. Models
called wren embed: a prompt becomes its length and its first tokens, not of length 1.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker.device_thread import Progress, Record
from ballast.core import migration
from ballast.core.actions import Change
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.errors import DeviceLost
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    CancelledOutput,
    DrainEvent,
    EmbeddingOutput,
    Event,
    FailedOutput,
    FinishedOutput,
    Output,
    PromptScoresOutput,
    StopEvent,
    TokenOutput,
)
from ballast.core.lease import Lease, LendingMessage
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.isolation.confinement import confine_worker
from ballast.memory.vm import Exported

HOLD = 1001
"""Two tokens, then nothing until cancelled."""
DIE = 1002
"""The process is killed whenever it runs, with all that is open in flight."""
REFUSE = 1003
"""Failed at once: the queue is full."""
BREAK = 1004
"""Failed after two tokens."""
TELL = 1005
"""Failed at once, with the submission (JSON) as the reason."""
SILENT = 1006
"""Nothing until cancelled."""
PAUSE = 1007
"""Two tokens in each worker that gets it, until `max_tokens` are there."""
STUCK = 1008
"""The same, in a job that does not end by itself."""
LOSE = 1009
"""Two tokens, and the device is lost; the worker that gets it then has the rest."""
PARTIAL = {HOLD: 2, DIE: 0, BREAK: 2, SILENT: 0}
"""Tokens, by seed."""


def spec(name: str, max_model_len: int = 256, vocab: int = 100_000) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=1,
        n_heads=1,
        kv_heads=1,
        head_dim=8,
        hidden=8,
        intermediate=8,
        vocab=vocab,
        dtype="float32",
        max_model_len=max_model_len,
        block_tokens=16,
        segment_bytes=(8,),
        fingerprint="0123456789abcdef",
        embeds="wren" in name,
    )


class EchoDevice:
    """Token `i` of an output is token `i` of the prompt, round and round."""

    reach = None

    def __init__(
        self,
        fleet: FleetSettings,
        outbox: Callable[[list[Output]], None],
        record: Record,
        progress: Progress,
        segments: SegmentClient | None,
    ) -> None:
        if (file := os.environ.get("BALLAST_TEST_DEVICE_FAILS")) and Path(file).exists():
            raise MemoryError("no room for the pool now")
        if fleet.options.get("unbuildable"):
            raise MemoryError("no room for the pool")
        if os.environ.get("BALLAST_TEST_DEVICE_CONFINED"):
            confine_worker()
        if fleet.options.get("mute"):
            signal.pause()  # as if loading took for ever
        if seconds := os.environ.get("BALLAST_TEST_DEVICE_COMPUTES"):
            _compute_with_the_lock(float(seconds))
        if os.environ.get("BALLAST_TEST_DEVICE_CLUTCHES"):
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter lock, as `PyDLL` keeps it
        self.failed = {m.name: "it is broken" for m in fleet.models if "broken" in m.path}
        self.failed |= fleet.faults
        self.specs = {m.name: _spec_of(m) for m in fleet.models if m.name not in self.failed}
        self._decided = [_activated(name) for name in self.specs]
        self._fleet = fleet
        self._outbox = outbox
        self._record = record
        self._stuck = False
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: dict[str, Submission] = {}
        self._begun = set[str]()
        """Open requests whose first outputs are on their way to the server."""
        self._had_begun = frozenset[str]()
        """The same when the last report was made: the worker has sent their outputs since."""
        self._draining = False

    def post(self, event: Event) -> None:
        self._events.put(event)

    def export(self, pages: Sequence[int] = ()) -> None:
        """It has no memory."""

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        return ()

    def import_pages(self, exported: Exported) -> Exported:
        raise NotImplementedError

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None:
        raise NotImplementedError

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        raise NotImplementedError

    def set_lending_outbox(self, say: Callable[[LendingMessage], None]) -> None:
        """It has nothing to say."""

    def migrate(self, order: migration.MigrationStep) -> None:
        if isinstance(order, migration.ExportKvEvent):
            # It has no KV.
            self._say(migration.KvExportedAnswer(order.request_id, 0, attempt=order.attempt))

    def set_migration_outbox(self, say: Callable[[migration.MigrationAnswer], None]) -> None:
        self._say = say

    def command(
        self, order: DeviceCommand, done: Callable[[CommandOutcome], None], by: str
    ) -> None:
        match order:
            case Add(settings) if "broken" in settings.path:
                done(CommandOutcome("invalid", "it is broken"))
                return
            case Add(settings) if settings.name in self.specs:
                done(CommandOutcome("refused", f"there is a model {settings.name!r} already"))
                return
            case Add(settings) if "deadly" in settings.path:
                os.kill(os.getpid(), signal.SIGKILL)
            case Add(settings):
                self.specs = {**self.specs, settings.name: _spec_of(settings)}
                self._decided.append(_activated(settings.name))
            case Remove(name):
                self.specs = {n: s for n, s in self.specs.items() if n != name}
            case Change():
                changed = replace(self.specs[order.model], pinned=order.pinned, slo=order.slo)
                self.specs = {**self.specs, order.model: changed}
        done(CommandOutcome(specs=self.specs))

    def run(self) -> None:
        while not (self._draining and not self._open):
            event = self._events.get()
            if isinstance(event, ArrivalEvent):
                self._outbox(self._answer(event.submission))
                self._begun.update(self._open.keys() & {event.submission.id})
                if event.submission.sampling.seed == LOSE and event.submission.resumed is None:
                    raise DeviceLost("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS")
            elif isinstance(event, CancelEvent):
                self._begun.discard(event.request_id)
                if self._open.pop(event.request_id, None) is not None:
                    self._outbox([CancelledOutput(event.request_id)])
            elif isinstance(event, DrainEvent):
                self._draining = True
            elif isinstance(event, StopEvent):
                self._outbox([FailedOutput(i, "unavailable", event.reason) for i in self._open])
                return

    def _answer(self, s: Submission) -> list[Output]:
        if self._draining:
            return [FailedOutput(s.id, "unavailable", "draining")]
        if s.sampling.seed == REFUSE:
            return [FailedOutput(s.id, "queue_full", "too many wait")]
        if s.sampling.seed == TELL:
            return [FailedOutput(s.id, "told", msgspec.json.encode(s).decode())]
        if s.embed:
            values = array.array("f", [len(s.prompt), *s.prompt, *[0] * 8][:8])
            done = FinishedOutput(s.id, "stop", len(s.prompt), 0, 0, 0)
            return [EmbeddingOutput(s.id, values.tobytes()), done]
        self._open[s.id] = s
        seed = s.sampling.seed
        if seed == DIE:
            self._record(self._open)
            os.kill(os.getpid(), signal.SIGKILL)
        before = len(s.resumed or ())
        most = s.max_tokens
        if seed in (PAUSE, STUCK) or (seed == LOSE and not before):
            most = min(most, before + 2)
        tokens = _tokens(s, before, PARTIAL.get(seed, most))
        outputs: list[Output] = [*_scores(s), *tokens]
        count = before + len(tokens)
        partial = seed in PARTIAL or (seed in (PAUSE, STUCK, LOSE) and count < s.max_tokens)
        if seed == BREAK:
            outputs.append(FailedOutput(s.id, "internal_error", "the job broke"))
        elif not partial:
            reason = "length" if count == s.max_tokens else "stop"
            outputs.append(FinishedOutput(s.id, reason, len(s.prompt), count, 0, 0))
        if seed == BREAK or not partial:
            del self._open[s.id]
        self._stuck = self._stuck or (seed == STUCK and partial)
        return outputs

    def decisions(self) -> tuple[dict[str, Any], ...]:
        result, self._decided = tuple(self._decided), []
        return result

    def busy(self) -> tuple[float, float]:
        return (0.0, 1e6 if self._stuck else 0.0)

    def snapshot(self) -> DeviceReport:
        opened = dict(self._open)
        # Who is told that a request runs has been sent its tokens.
        runs = [s for i, s in opened.items() if i in self._had_begun]
        self._had_begun = frozenset(self._begun)
        models = tuple(
            ModelReport(
                name=name,
                residency="resident",
                weight_pages=4,
                kv_pages=sum(s.model == name for s in opened.values()),
                cached_pages=0,
                waiting=0,
                running=sum(s.model == name for s in runs),
                late=0,
                lane_seconds=0.0,
                activations=1,
                evictions=0,
                preemptions=0,
                prompt_tokens=0,
                cached_tokens=0,
                output_tokens=0,
            )
            for name in self.specs
        )
        owners = {"arena:lane0": 2, "arena:lane1": 1}
        for m in models:
            owners |= {f"weights:{m.name}": m.weight_pages, f"kv:{m.name}": m.kv_pages}
        return DeviceReport(
            device=self._fleet.device.name,
            now=0.0,
            page_bytes=4096,
            total=100,
            free=100 - sum(owners.values()),
            reclaiming=0,
            owners=owners,
            models=models,
            jobs=0,
            draining=self._draining,
        )

    def close(self) -> None:
        pass


def _spec_of(m: ModelSettings) -> ModelSpec:
    return replace(
        spec(m.name, m.max_model_len or 256),
        pinned=m.pinned,
        sampling=m.sampling,
        max_answer=m.max_answer,
    )


def _activated(model: str) -> dict[str, Any]:
    return {"at": 0.0, "action": "Activate", "model": model, "why": "a test"}


def _compute_with_the_lock(seconds: float) -> None:
    """Take so much processor time in one call that keeps the interpreter lock."""
    n, used = 1000, 0.0
    while used < seconds:
        n = int(n * min(10.0, 1.2 * seconds / used)) if used > 0 else 10 * n
        began = time.thread_time()
        sum(itertools.repeat(1, n))
        used = time.thread_time() - began


def _tokens(s: Submission, begin: int, end: int) -> list[TokenOutput]:
    found: list[TokenOutput] = []
    for i in range(begin, end):
        token = s.prompt[i % len(s.prompt)]
        logprob = -0.5 if s.sampling.logprobs is not None else None
        found.append(TokenOutput(s.id, token, i, logprob, _top(token, s.sampling.logprobs, -0.5)))
        if token in s.stop_token_ids and i + 1 > s.sampling.min_tokens:
            break
    return found


def _scores(s: Submission) -> list[PromptScoresOutput]:
    """In two parts, as a prompt that is computed in two steps has them."""
    if s.prompt_logprobs is None:
        return []
    middle = (len(s.prompt) + 1) // 2
    return [
        PromptScoresOutput(
            s.id,
            start,
            tuple(float(-i) for i in range(start, end)),
            tuple(_top(s.prompt[i], s.prompt_logprobs, -i) for i in range(start, end)),
        )
        for start, end in ((1, middle), (max(1, middle), len(s.prompt)))
    ]


def _top(token: int, count: int | None, first: float) -> tuple[tuple[int, float], ...]:
    return tuple((token + k, float(first - k)) for k in range(count or 0))


if __name__ == "__main__":
    from ballast.cluster.worker.process import main
    from ballast.transport import curve

    # A machine without time for it is no broken connection.
    curve.LOST_SECONDS = curve.HANDSHAKE_SECONDS = 240.0
    main(make_device=EchoDevice, warm_up=lambda: None)
