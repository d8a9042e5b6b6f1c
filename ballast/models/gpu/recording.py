"""Record a pass as CUDA graphs piece by piece, with callbacks between the pieces on replay.

The callbacks are the pass's barriers at rotating layers. Used by `GraphCache`
(`models/gpu/graphs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Stops(Protocol):
    """Callbacks of a pass at each layer that comes and goes: `Barriers`, or a `Recording`."""

    def wait(self, layer: int) -> None:
        """Wait for a layer before it is run."""

    def used(self, layer: int) -> None:
        """Mark a layer as used."""


class Graph(Protocol):
    """One piece. Replayed on the stream that the thread's work goes to."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records graphs on one stream: `ballast.memory.cuda.graphs.TorchRecorder` in earnest.

    Its graphs share memory for what they compute, as they never run at the same time. So they are
    freed together, by `clear`: there is no way to free one of them alone.
    """

    @property
    def n_bytes(self) -> int:
        """Device memory in bytes that its graphs write to."""

    @property
    def n_graphs(self) -> int:
        """Graphs recorded since the last `clear`, those of abandoned recordings included."""

    def session(self) -> AbstractContextManager[object]:
        """Around a recording, by a thread whose work is recorded."""

    def begin(self) -> None:
        """Work that is launched from here on does not run, but becomes a piece."""

    def end(self) -> Graph: ...

    def abandon(self) -> None:
        """End the piece that was begun, if any; it is never replayed."""

    def clear(self) -> None:
        """Free all its graphs. None of them runs, and none is replayed again."""

    def output(self, tensor: Tensor) -> Tensor:
        """Return the tensor that a piece writes each time; other graphs may reuse its memory."""


class Recording:
    """Implements `Stops`: pieces of a pass, and the calls made between them."""

    def __init__(self, recorder: GraphRecorder, cuts: Sequence[int]) -> None:
        self.pieces: list[Graph] = []
        self._between: list[tuple[int | None, int | None]] = []
        """After each piece but the last: the layer that was used, the one to wait for."""
        self._recorder, self._cuts = recorder, frozenset(cuts)
        self._used: int | None = None

    def wait(self, layer: int) -> None:
        self._cut(layer)

    def used(self, layer: int) -> None:
        self._used = layer
        if layer + 1 not in self._cuts:
            self._cut(None)

    def replay(self, stops: Stops | None) -> None:
        """Replay on the thread's stream, with calls of `stops` where it was cut."""
        for i, piece in enumerate(self.pieces):
            piece.replay()
            if stops is None or i == len(self._between):
                continue
            used, awaited = self._between[i]
            if used is not None:
                stops.used(used)
            if awaited is not None:
                stops.wait(awaited)

    def begin(self) -> None:
        self._recorder.begin()

    def end(self) -> None:
        self.pieces.append(self._recorder.end())

    def _cut(self, awaited: int | None) -> None:
        self.end()
        self._between.append((self._used, awaited))
        self._used = None
        self._recorder.begin()
