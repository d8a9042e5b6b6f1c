"""Record CUDA graphs of passes while nothing runs, and replay them for jobs of their bucket.

Of decode steps and short prefills: executors say which are worth it.

A graph holds virtual addresses, and those stay whatever happens to the pages beneath: it is valid
as long as its model is served, resident or not. Recording runs nothing and touches no memory of the
model, so it can be done while weights are loading or absent. A bucket is recorded after a job of it
has run without a graph: by then kernels are compiled and workspaces allocated, neither of which is
allowed while recording.

A pass that has to wait for layers is cut there: pieces are recorded one by one, and the waits are
called between them.

Graphs of one stream are freed together (`GraphRecorder.clear`). A full cache frees those of the
stream used least recently. A model that is removed only stops using its own, which are freed with
the stream's others, or at once if the stream has no others.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.report import GraphReport
from ballast.core.units import MiB
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.models.gpu.recording import GraphRecorder, Recording, Stops

log = logging.getLogger(__name__)

PIECE_BYTES = 2 * MiB
"""Device memory that the driver is assumed to need for a piece beside its kernels' outputs: 0 to
6 MiB on an H200."""
MOST_PADDING = 2
"""Rows of a recorded prefill for each row of a job that may use it."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The jobs that a recording can run."""

    model: str
    stream: int
    """Its kernels are bound to the stream's multiprocessors."""
    bucket: Bucket
    cuts: tuple[int, ...] = ()
    """Layers that the pass waits for, ascending."""


Step = Callable[[Recording], Tensor]
"""A pass over the tensors of a bucket: launches its work, calls the recording where it stops, and
returns its result."""


@dataclass(slots=True)
class _Wish:
    """A recording that is wanted."""

    step: Step
    runs: int = 0
    """Runs so far without a graph."""
    at_once: bool = False
    """Record without waiting for a run."""


@dataclass(slots=True)
class RecordedPass:
    """A recorded pass, which can be replayed."""

    step: Step
    bucket: Bucket
    recording: Recording
    output: Tensor

    def replay(self, stops: Stops | None) -> Tensor:
        """Run the pass; its result is valid until the next pass of any model on this stream."""
        self.recording.replay(stops)
        return self.output


class GraphCache:
    """The CUDA graphs of one device, within `cap_bytes`. Callable from any thread unless stated
    otherwise."""

    def __init__(self, cap_bytes: int, recorder: Callable[[int], GraphRecorder]) -> None:
        """`recorder`: makes the recorder of a stream."""
        self.cap_bytes = cap_bytes
        self._make = recorder
        self._recorders: dict[int, GraphRecorder] = {}
        self._kept: OrderedDict[GraphKey, RecordedPass] = OrderedDict()
        self._wanted: dict[GraphKey, _Wish] = {}
        """Recordings that are wanted, in order of the last run without them."""
        self._past: OrderedDict[GraphKey, Step] = OrderedDict()
        """Passes whose graphs were freed to make room, the latest last."""
        self._refused: dict[GraphKey, str] = {}
        self._refused_models: dict[tuple[str, bool], str] = {}
        """By model, and whether its decodes or its prefills: one may be recordable alone."""
        self._replays = self._eager = self._dropped = 0
        self._here = threading.local()
        self._running = 0
        self._lock = threading.RLock()
        """Held throughout a recording."""

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Mark this thread as running a job on that stream."""
        with self._lock:
            self._running += 1
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = None
            with self._lock:
                self._running -= 1

    def find(self, model: str, bucket: Bucket, cuts: Sequence[int] = ()) -> RecordedPass | None:
        """Find a recording for the thread's job: of a bucket for as many sequences, and at least as
        many blocks; of a prefill also for up to `MOST_PADDING` times as many rows."""
        stream = getattr(self._here, "stream", None)
        if stream is None:
            return None
        with self._lock:
            key = GraphKey(model, stream, bucket, tuple(cuts))
            if key not in self._kept:
                larger = [k for k in self._kept if _holds(k, key)]
                if not larger:
                    self._eager += 1
                    return None
                key = min(larger, key=lambda k: (k.bucket.tokens, k.bucket.blocks))
            self._kept.move_to_end(key)
            self._replays += 1
            return self._kept[key]

    def want(self, model: str, bucket: Bucket, step: Step, cuts: Sequence[int] = ()) -> None:
        """Record that the thread's job ran without a graph: one may be recorded for the next
        time. Of prefills only in the half of the memory that decodes have not taken: there are
        many more kinds of them, and a full cache loses all graphs of a stream."""
        stream = getattr(self._here, "stream", None)
        if stream is None:
            return
        key = GraphKey(model, stream, bucket, tuple(cuts))
        with self._lock:
            if not bucket.decodes and self.n_bytes > self.cap_bytes // 2:
                return
            if key not in self._refused and (model, bucket.decodes) not in self._refused_models:
                wish = self._wanted.pop(key, None) or _Wish(step)
                wish.runs += 1
                self._wanted[key] = wish

    def activating(self, model: str) -> None:
        """Want the graph again that the model lost last, as its weights are loading.

        Only one, as recording holds the interpreter lock, which the link's threads need to go on
        copying.
        """
        with self._lock:
            lost = [key for key in self._past if key.model == model and not key.cuts]
            if lost:
                key = lost[-1]
                self._wanted[key] = _Wish(self._past.pop(key), at_once=True)

    def due(self, runs: int) -> bool:
        """Whether a recording is wanted for which `runs` jobs have run without a graph, or at
        once."""
        with self._lock:
            return any(wish.at_once or wish.runs >= runs for wish in self._wanted.values())

    @property
    def wanted(self) -> int:
        """Number of recordings that are wanted."""
        return len(self._wanted)

    @property
    def n_bytes(self) -> int:
        """Device memory in bytes of all graphs that have not been freed."""
        recorders = list(self._recorders.values())
        return sum(PIECE_BYTES * r.n_graphs + r.n_bytes for r in recorders)

    def record_one(self) -> None:
        """Make the recording wanted most: at once, or by most runs; of equals the last. No job may
        run on the device meanwhile."""
        with self._lock:
            if self._running:
                raise BrokenPromise("a graph was to be recorded beside a job")
            if not self._wanted:
                return
            last = reversed(self._wanted)
            key = max(last, key=lambda k: (self._wanted[k].at_once, self._wanted[k].runs))
            alone = self.n_bytes == 0
            wish = self._wanted.pop(key)
            made = self._record(key, wish.step)
            if made is not None:
                self._kept[key] = made
                self._past.pop(key, None)
            self._shrink()
            if made is not None and key not in self._kept:
                if alone or not key.bucket.decodes:
                    self._past.pop(key, None)
                    self._refuse(key, f"it takes more than {self.cap_bytes} bytes")
                else:
                    # It was freed with the other graphs of its stream; now there is room.
                    wish.at_once = True
                    self._wanted[key] = wish

    def forget(self, model: str) -> None:
        """Use no graph of `model` again, as it is removed or its addresses change. Called by the
        thread that adds and removes models, while no job of it runs."""
        with self._lock:
            streams = {k.stream for k in self._kept if k.model == model}
            self._dropped += sum(1 for k in self._kept if k.model == model)
            for keys in (self._kept, self._wanted, self._refused, self._past):
                for key in [k for k in keys if k.model == model]:
                    del keys[key]
            for decodes in (True, False):
                self._refused_models.pop((model, decodes), None)
            for stream in streams - {k.stream for k in self._kept}:
                self._recorders[stream].clear()

    def report(self) -> GraphReport:
        kept = list(self._kept.values())
        return GraphReport(
            graphs=len(kept),
            pieces=sum(len(r.recording.pieces) for r in kept),
            n_bytes=self.n_bytes,
            cap_bytes=self.cap_bytes,
            replays=self._replays,
            eager=self._eager,
            dropped=self._dropped,
        )

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
            for recorder in self._recorders.values():
                recorder.clear()
            self._wanted.clear()
            self._past.clear()
            self._recorders.clear()

    def _record(self, key: GraphKey, step: Step) -> RecordedPass | None:
        try:
            recorder = self._recorders.get(key.stream)
            if recorder is None:
                recorder = self._recorders[key.stream] = self._make(key.stream)
            recording = Recording(recorder, key.cuts)
            with recorder.session():
                try:
                    recording.begin()
                    output = recorder.output(step(recording))
                    recording.end()
                except BaseException:
                    recorder.abandon()
                    raise
        except (DeviceError, torch.OutOfMemoryError) as error:
            self._refuse(key, str(error))
            return None
        except RuntimeError as error:
            # A call within it cannot be recorded, for instance as it waits for the device.
            decodes = key.bucket.decodes
            self._refused_models[key.model, decodes] = str(error)
            passes = "decodes" if decodes else "prefills"
            log.warning("%s runs %s without CUDA graphs: %s", key.model, passes, error)
            return None
        return RecordedPass(step, key.bucket, recording, output)

    def _refuse(self, key: GraphKey, why: str) -> None:
        self._refused[key] = why
        log.info("no CUDA graph for %s: %s", key, why)

    def _shrink(self) -> None:
        """Free the graphs of whole streams, the one used least recently first, down to the cap."""
        while self._kept and self.n_bytes > self.cap_bytes:
            streams = dict.fromkeys(key.stream for key in reversed(self._kept))
            self._free(next(reversed(streams)))

    def _free(self, stream: int) -> None:
        for key in [k for k in self._kept if k.stream == stream]:
            self._past.pop(key, None)
            self._past[key] = self._kept.pop(key).step
            self._dropped += 1
        self._recorders[stream].clear()


def _holds(made: GraphKey, needed: GraphKey) -> bool:
    a, b = made.bucket, needed.bucket
    same = (made.model, made.stream, made.cuts) == (needed.model, needed.stream, needed.cuts)
    same = same and (a.sequences, a.adapters, a.decodes) == (b.sequences, b.adapters, b.decodes)
    rows = b.tokens <= a.tokens <= MOST_PADDING * b.tokens and a.wanted >= b.wanted
    return same and rows and a.blocks >= b.blocks
