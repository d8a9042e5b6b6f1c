"""Collect the requests of a trace, and make its workload.

Used by `workload.traces` and `workload.block_traces`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest


class _BlockIds(dict[int, int]):
    """A number for each block that is asked for, from `first` on, in order."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first

    def __missing__(self, block: int) -> int:
        number = self[block] = self.first + len(self)
        return number


class TraceRequests:
    """The requests of one file, in its order. Counts what had to be filled in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[WorkloadRequest] = []
        self._without_prompt = self._without_output = 0
        self._block_ids = _BlockIds()

    def add(
        self,
        at: float,
        model: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        session: str | None = None,
        blocks: tuple[int, ...] | None = None,
        block_tokens: int = 0,
    ) -> None:
        """Append a request. 0 tokens become 1, since a request without any cannot be served.
        `blocks`: as the file names them, which may be any numbers."""
        self._without_prompt += prompt_tokens == 0
        self._without_output += output_tokens == 0
        if blocks is not None:
            # One int object serves all prompts that name a block.
            blocks = tuple(map(self._block_ids.__getitem__, blocks))
        self.requests.append(
            WorkloadRequest(
                id=len(self.requests),
                at=at,
                model=model,
                prompt_tokens=max(1, prompt_tokens),
                output_tokens=max(1, output_tokens),
                session=session,
                prefix_blocks=blocks,
                block_tokens=block_tokens,
            )
        )

    def separate_blocks(self) -> None:
        """From here on, equal numbers of blocks are other blocks than so far."""
        self._block_ids = _BlockIds(self._block_ids.first + len(self._block_ids))

    def workload(self, source: str, *labels: str) -> Workload:
        """The workload, its times moved so that the first request is at 0. Raises WorkloadError
        where there are no requests."""
        if not self.requests:
            raise WorkloadError("holds no requests", str(self.path))
        start = min(r.at for r in self.requests)
        moved = (replace(r, at=r.at - start) for r in self.requests) if start else self.requests
        filled = [
            f"{n} requests recorded with 0 {what} tokens have 1"
            for what, n in (("prompt", self._without_prompt), ("output", self._without_output))
            if n
        ]
        return Workload.of(self.path.name.split(".")[0], moved, source, (*labels, *filled))
