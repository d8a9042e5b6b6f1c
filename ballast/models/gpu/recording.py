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
    """Callbacks of a pass at each rotating or loading layer: `Barriers`, or a `Recording`."""

    def wait(self, layer: int) -> None:
        """Wait for a layer before it runs."""

    def used(self, layer: int) -> None:
        """Mark a layer as used."""


class Graph(Protocol):
    """One piece of a pass. It is replayed on the stream of the thread's work."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Records graphs on one stream; implemented by `ballast.memory.cuda.graphs.TorchRecorder`.

    Its graphs share memory for their results, as they never run at the same time. So they are freed
    together, by `clear`: one of them cannot be freed alone.
    """

    @property
    def n_bytes(self) -> int:
        """Bytes of device memory that its graphs write to."""

    @property
    def n_graphs(self) -> int:
        """Graphs recorded since the last `clear`, including those of abandoned recordings."""

    def session(self) -> AbstractContextManager[object]:
        """Return the context of a recording, entered by the thread whose work is recorded."""

    def begin(self) -> None:
        """Begin a piece: work launched from here on does not run, but is recorded."""

    def end(self) -> Graph: ...

    def abandon(self) -> None:
        """End the piece that was begun, if any; it must not be replayed."""

    def clear(self) -> None:
        """Free all its graphs. None of them may be running, or be replayed again."""

    def output(self, tensor: Tensor) -> Tensor:
        """Return the tensor that a piece writes each time; other graphs may reuse its memory."""


class Recording:
    """Implements `Stops`: pieces of a pass, and the calls made between them."""

    def __init__(self, recorder: GraphRecorder, cuts: Sequence[int]) -> None:
        self.pieces: list[Graph] = []
        self._between: list[tuple[int | None, int | None]] = []
        """After each piece but the last: the layer that was used, and the one to wait for."""
        self._recorder, self._cuts = recorder, frozenset(cuts)
        self._used: int | None = None

    def wait(self, layer: int) -> None:
        self._cut(layer)

    def used(self, layer: int) -> None:
        self._used = layer
        if layer + 1 not in self._cuts:
            self._cut(None)

    def replay(self, stops: Stops | None) -> None:
        """Replay the pieces on the thread's stream, calling `stops` between them."""
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
