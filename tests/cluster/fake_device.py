"""A device that follows the worker's protocol without a model: it repeats the prompt.

Run as a script, it is a worker process with such a device. What a request does is chosen by its
seed, so that tests need no timing: see `HOLD`, `DIE`, `REFUSE`.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable

from ballast.core.event import (
    Arrival,
    Cancel,
    Cancelled,
    Drain,
    Event,
    Failed,
    Finished,
    Output,
    Stop,
    TokenOut,
)
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings

HOLD = 1001
"""Two tokens, then nothing until cancelled."""
DIE = 1002
"""Two tokens, then the process is killed."""
REFUSE = 1003
"""Failed at once: the queue is full."""
BREAK = 1004
"""Failed after two tokens."""


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
    )


class EchoDevice:
    """Token `i` of an output is token `i` of the prompt, round and round."""

    def __init__(self, fleet: FleetSettings, outbox: Callable[[list[Output]], None]) -> None:
        if fleet.options.get("unbuildable"):
            raise MemoryError("no room for the pool")
        if fleet.options.get("mute"):
            signal.pause()  # as if loading took for ever
        self.failed = {m.name: "it is broken" for m in fleet.models if "broken" in m.path}
        self.specs = {
            m.name: spec(m.name, m.max_model_len or 256)
            for m in fleet.models
            if m.name not in self.failed
        }
        self._fleet = fleet
        self._outbox = outbox
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: dict[str, Submission] = {}
        self._draining = False

    def post(self, event: Event) -> None:
        self._events.put(event)

    def run(self) -> None:
        while not (self._draining and not self._open):
            event = self._events.get()
            if isinstance(event, Arrival):
                self._outbox(self._answer(event.submission))
            elif isinstance(event, Cancel):
                if self._open.pop(event.request_id, None) is not None:
                    self._outbox([Cancelled(event.request_id)])
            elif isinstance(event, Drain):
                self._draining = True
            elif isinstance(event, Stop):
                self._outbox([Failed(i, "unavailable", event.reason) for i in self._open])
                return

    def _answer(self, s: Submission) -> list[Output]:
        if self._draining:
            return [Failed(s.id, "unavailable", "draining")]
        if s.sampling.seed == REFUSE:
            return [Failed(s.id, "queue_full", "too many wait")]
        partial = s.sampling.seed in (HOLD, DIE, BREAK)
        count = 2 if partial else s.max_tokens
        outputs: list[Output] = [
            TokenOut(
                s.id,
                s.prompt[i % len(s.prompt)],
                i,
                -0.5 if s.sampling.logprobs is not None else None,
            )
            for i in range(count)
        ]
        if s.sampling.seed == BREAK:
            return [*outputs, Failed(s.id, "internal_error", "the job broke")]
        if partial:
            self._open[s.id] = s
            if s.sampling.seed == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            return outputs
        return [*outputs, Finished(s.id, "length", len(s.prompt), count, 0, 0)]

    def snapshot(self) -> DeviceReport:
        models = tuple(
            ModelReport(
                name=name,
                residency="resident",
                weight_pages=4,
                kv_pages=sum(s.model == name for s in list(self._open.values())),
                cached_pages=0,
                waiting=0,
                running=sum(s.model == name for s in list(self._open.values())),
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
            device="fake",
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


if __name__ == "__main__":
    from ballast.cluster.worker import main

    sys.exit(main(make_device=EchoDevice))
