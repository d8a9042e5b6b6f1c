"""PyTorch's CUDA graphs: the one module that records and replays them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ballast.memory.cuda_tensor import device_tensor_at


class TorchRecorder:
    """Implements `ballast.models.recording.Recorder` on a stream of its own.

    What recorded kernels compute lies in one private pool of PyTorch's allocator: PyTorch says that
    graphs may share one if none runs beside another, or needs what another has left there. The pool
    goes back to the driver with its last graph.
    """

    def __init__(self, ordinal: int, stream: int) -> None:
        """`stream`: of the driver, on the multiprocessors that graphs are to run on; nothing else
        uses it, and no fence waits for it: an event recorded there would become part of a graph."""
        self.n_bytes = 0
        self._device = torch.device("cuda", ordinal)
        external: Any = torch.cuda.ExternalStream
        self._stream = external(stream, device=self._device)
        self._pool: Any = None
        self._graphs = 0
        """That have not been reset."""
        self._open: Any = None
        self._broken: list[Any] = []
        self._known = threading.local()

    @contextmanager
    def session(self) -> Iterator[None]:
        """No job runs on the device meanwhile."""
        with torch.cuda.stream(self._stream):
            if not getattr(self._known, "yes", False):
                # cuBLAS keeps a workspace for each thread and stream: not in the pool, please.
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.zeros((16, 16), dtype=dtype, device=self._device)
                    torch.mm(x, x)
                self._stream.synchronize()
                self._known.yes = True
            # While something is recorded, the allocator frees nothing to make room.
            torch.cuda.empty_cache()
            before = self._reserved()
            collecting = gc.isenabled()
            gc.disable()  # what is collected may unload a kernel, which ends a recording
            try:
                yield
            finally:
                if collecting:
                    gc.enable()
                self.n_bytes += max(0, self._reserved() - before)
                self._release()

    def begin(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may go on: the link waits for its events, the loop maps pages.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self) -> TorchGraph:
        graph, self._open = self._open, None
        graph.capture_end()
        self._graphs += 1
        return TorchGraph(graph, self)

    def abandon(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            # What was invalid PyTorch does not end: it asks this graph about every allocation from
            # now on, and frees nothing to make room, until it is told.
            self._broken.append(graph)
            allocator: Any = torch._C
            with suppress(RuntimeError):
                allocator._cuda_endAllocateToPool(self._device.index, self._pool)
                allocator._cuda_releasePool(self._device.index, self._pool)
        graph.reset()

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.data_ptr()
        return device_tensor_at(at, tensor.shape, tensor.dtype, self._device, tensor.stride())

    def gone(self) -> None:
        """One of its graphs was reset."""
        self._graphs -= 1
        self._release()

    def _release(self) -> None:
        if self._graphs == 0 and self._open is None and self._pool is not None:
            # A pool that has had its last graph cannot be used again.
            self._pool, self.n_bytes = None, 0
            torch.cuda.empty_cache()

    def _reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))


class TorchGraph:
    """Implements `ballast.models.recording.Graph`."""

    def __init__(self, graph: Any, recorder: TorchRecorder) -> None:
        self._graph, self._recorder = graph, recorder

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()
        self._recorder.gone()
