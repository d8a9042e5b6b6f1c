"""Record and replay CUDA graphs of decode steps by PyTorch; the only module that does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ballast.memory.cuda.tensor import cuda_tensor_at


class TorchRecorder:
    """Implements `ballast.models.gpu.recording.GraphRecorder` on a stream of its own.

    What recorded kernels compute lies in one private pool of PyTorch's allocator: PyTorch says that
    graphs may share one if none runs beside another, or needs what another has left there.

    Graphs are freed together. `CUDAGraph.reset()`, which its destructor calls as well, frees the
    cuBLAS workspaces of the stream that the graph was recorded on (PyTorch 2.13,
    pytorch/pytorch#193402), and every graph of the stream has their address in it. So a graph is
    kept here, used or not, until all are reset.
    """

    def __init__(self, ordinal: int, stream: int) -> None:
        """`stream`: of the driver, on the multiprocessors that graphs are to run on; nothing else
        uses it, and no fence waits for it: an event recorded there would become part of a graph."""
        self.n_bytes = 0
        self._device = torch.device("cuda", ordinal)
        external: Any = torch.cuda.ExternalStream
        self._stream = external(stream, device=self._device)
        self._pool: Any = None
        self._graphs: list[Any] = []
        """Recorded since the last `clear`."""
        self._usable = False
        """Whether any of them may be replayed: belongs to a recording that was not abandoned."""
        self._open: Any = None
        self._broken: list[Any] = []
        """Graphs whose recording the driver had ended: their pool may still name them."""
        self._warm = threading.local()
        """`yes` in threads whose cuBLAS workspace for this stream exists."""

    @property
    def n_graphs(self) -> int:
        return len(self._graphs)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Enter a recording. No job may run on the device meanwhile."""
        with torch.cuda.stream(self._stream):
            if not getattr(self._warm, "yes", False):
                # cuBLAS keeps a workspace for each thread and stream: not in the pool, please.
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.zeros((16, 16), dtype=dtype, device=self._device)
                    torch.mm(x, x)
                self._stream.synchronize()
                self._warm.yes = True
            # While something is recorded, the allocator frees nothing to make room.
            torch.cuda.empty_cache()
            before = self._reserved()
            collecting = gc.isenabled()
            gc.disable()  # what is collected may unload a kernel, which ends a recording
            try:
                yield
                self._usable = True
            finally:
                if collecting:
                    gc.enable()
                self.n_bytes += max(0, self._reserved() - before)
                if not self._usable:
                    self.clear()

    def begin(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may go on: the link waits for its events, the loop maps pages.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph
        self._graphs.append(graph)

    def end(self) -> TorchGraph:
        graph = self._open
        graph.capture_end()
        self._open = None
        return TorchGraph(graph)

    def abandon(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        with suppress(RuntimeError):
            graph.capture_end()
        if _ended(graph):
            return
        # PyTorch does not end an invalid recording: it asks this graph about every allocation from
        # now on, and frees nothing to make room, until the pool is ended and released.
        self._broken.append(graph)
        allocator: Any = torch._C
        for finish in (allocator._cuda_endAllocateToPool, allocator._cuda_releasePool):
            with suppress(RuntimeError):
                finish(self._device.index, self._pool)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.data_ptr()
        return cuda_tensor_at(at, tensor.shape, tensor.dtype, self._device, tensor.stride())

    def clear(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._usable = False
        # The workspaces are gone, and a pool that has had its last graph cannot be used again.
        self._warm = threading.local()
        self._pool, self.n_bytes = None, 0
        torch.cuda.empty_cache()

    def _reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))


def _ended(graph: Any) -> bool:
    """Whether PyTorch has ended the recording of `graph`: it has its pool to release then."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


class TorchGraph:
    """Implements `ballast.models.gpu.recording.Graph`."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()
