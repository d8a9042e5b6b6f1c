"""Define `Workload`: requests with model, arrival time and token counts; and pure transforms of it.

A workload holds lengths, not text: `ballast.workload.prompts` makes token ids from it. Every
transform returns a new workload and adds a label that describes the change, so that a report can
state what was run. Request ids survive all transforms but `merge`. Used by `bench` and benchmarks;
the engine sees only submissions made from it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ballast.core.errors import BallastError
from ballast.core.units import ceil_div
from ballast.workload.stats import WorkloadStats, measure


class WorkloadError(BallastError):
    """A workload or trace that cannot be used. Names file and line where there are such."""

    def __init__(self, reason: str, file: str | None = None, line: int | None = None) -> None:
        where = "".join((file or "", "" if line is None else f", line {line}"))
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason, self.file, self.line = reason, file, line


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request."""

    id: int
    """Unique in its workload; seeds the part of the prompt that no other request shares."""
    at: float
    """Seconds from the start of the workload; 0 or more."""
    model: str
    prompt_tokens: int
    """1 or more."""
    output_tokens: int
    """1 or more."""
    session: str | None = None
    """Conversation or user that requests have in common, where the source says so."""
    prefix_blocks: tuple[int, ...] | None = None
    """Ids of consecutive blocks of the prompt, from its start: equal ids mean equal tokens."""
    block_tokens: int = 0
    """Tokens of each of these blocks (the prompt's end may cut the last); 0 without blocks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. Raises WorkloadError where they are not sorted or not valid."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    source: str = ""
    """Where it comes from, with licence or seed."""
    labels: tuple[str, ...] = ()
    """Changes and additions since, in order."""

    def __post_init__(self) -> None:
        for earlier, later in pairwise(self.requests):
            if (earlier.at, earlier.id) >= (later.at, later.id):
                raise WorkloadError(f"{self.name}: request {later.id} is out of order")
        if len({r.id for r in self.requests}) < len(self.requests):
            raise WorkloadError(f"{self.name}: request ids are not unique")
        for r in self.requests:
            if not 0 <= r.at < float("inf"):
                raise WorkloadError(f"{self.name}: request {r.id} arrives at {r.at!r} seconds")
            if r.prompt_tokens < 1 or r.output_tokens < 1:
                raise WorkloadError(
                    f"{self.name}: request {r.id} has {r.prompt_tokens} prompt and "
                    f"{r.output_tokens} output tokens; both must be 1 or more"
                )
            if r.prefix_blocks and r.block_tokens < 1:
                raise WorkloadError(f"{self.name}: request {r.id} has blocks of no size")

    @classmethod
    def of(
        cls,
        name: str,
        requests: Iterable[WorkloadRequest],
        source: str = "",
        labels: tuple[str, ...] = (),
    ) -> Workload:
        """A workload from requests in any order; ties in time are broken by id."""
        return cls(name, tuple(sorted(requests, key=lambda r: (r.at, r.id))), source, labels)

    @classmethod
    def merge(cls, name: str, workloads: Sequence[Workload]) -> Workload:
        """Several workloads at once, on one time axis, requests and blocks renumbered apart.

        Models and sessions of equal name become one.
        """
        requests: list[WorkloadRequest] = []
        next_id = next_block = 0
        for workload in workloads:
            id_base, block_base = next_id, next_block
            for r in workload.requests:
                blocks = r.prefix_blocks
                if blocks:
                    blocks = tuple(b + block_base for b in blocks)
                    next_block = max(next_block, max(blocks) + 1)
                next_id = max(next_id, id_base + r.id + 1)
                requests.append(replace(r, id=id_base + r.id, prefix_blocks=blocks))
        source = " + ".join(w.source for w in workloads)
        labels = tuple(f"{w.name}: {label}" for w in workloads for label in w.labels)
        return cls.of(name, requests, source, labels)

    @property
    def seconds(self) -> float:
        """Time of the last arrival; 0 if there is none."""
        return self.requests[-1].at if self.requests else 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """Models by descending number of requests, ties by name."""
        counts = Counter(r.model for r in self.requests)
        return tuple(sorted(counts, key=lambda m: (-counts[m], m)))

    def describe(self) -> str:
        """Name, source and labels in one line."""
        description = f"{self.name} ({self.source})" if self.source else self.name
        return "; ".join((description, *self.labels))

    def stats(self) -> WorkloadStats:
        """Rates, lengths and activity. Raises WorkloadError for an empty workload."""
        if not self.requests:
            raise WorkloadError(f"{self.name}: no requests, so no statistics")
        arrivals: dict[str, list[float]] = {}
        for r in self.requests:
            arrivals.setdefault(r.model, []).append(r.at)
        return measure(
            arrivals,
            (r.prompt_tokens for r in self.requests),
            (r.output_tokens for r in self.requests),
        )

    def scale_rate(self, factor: float) -> Workload:
        """`factor` times as many requests per second: all times are divided by it."""
        _positive("rate factor", factor)
        scaled = (replace(r, at=r.at / factor) for r in self.requests)
        return self._changed(scaled, f"rate x{factor:g}")

    def scale_lengths(
        self,
        prompt_factor: float = 1.0,
        output_factor: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
    ) -> Workload:
        """Token counts times factors, rounded, at least 1, at most the given maxima.

        Shared blocks shrink with their prompts, so that the shared share stays about the same;
        blocks beyond a cut prompt are dropped.
        """
        _positive("prompt factor", prompt_factor)
        _positive("output factor", output_factor)
        _positive("max_prompt", 1 if max_prompt is None else max_prompt)
        _positive("max_output", 1 if max_output is None else max_output)

        def scaled(r: WorkloadRequest) -> WorkloadRequest:
            prompt = _scaled(r.prompt_tokens, prompt_factor, max_prompt)
            output = _scaled(r.output_tokens, output_factor, max_output)
            if not r.prefix_blocks:
                return replace(r, prompt_tokens=prompt, output_tokens=output)
            size = _scaled(r.block_tokens, prompt_factor, None)
            blocks = r.prefix_blocks[: ceil_div(prompt, size)]
            return replace(
                r,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix_blocks=blocks,
                block_tokens=size,
            )

        description = f"lengths: prompt x{prompt_factor:g}, output x{output_factor:g}"
        for what, most in (("prompt", max_prompt), ("output", max_output)):
            description += "" if most is None else f", {what} at most {most}"
        return self._changed(map(scaled, self.requests), description)

    def map_models(self, names: Sequence[str], by: str = "popularity") -> Workload:
        """The workload's models replaced by `names`, the most popular by the first, and so on.

        The k most popular are mapped one to one; each of the rest, in descending popularity, joins
        the name with the least load so far (ties: the earlier name). `by` says what counts:
        `popularity` (requests) or `tokens` (prompt and output). Fewer models than names leave the
        last names without requests.
        """
        if not names or len(set(names)) != len(names):
            raise WorkloadError(f"model names must be given and distinct: {list(names)!r}")
        weighers: Mapping[str, Callable[[WorkloadRequest], int]] = {
            "popularity": lambda _: 1,
            "tokens": lambda r: r.prompt_tokens + r.output_tokens,
        }
        if by not in weighers:
            raise WorkloadError(f"by: {by!r}: {' or '.join(weighers)}")
        loads: Counter[str] = Counter()
        for r in self.requests:
            loads[r.model] += weighers[by](r)
        ranked = sorted(loads, key=lambda m: (-loads[m], m))
        target: dict[str, str] = {}
        taken = dict.fromkeys(names, 0)
        for rank, model in enumerate(ranked):
            name = names[rank] if rank < len(names) else min(names, key=taken.__getitem__)
            target[model] = name
            taken[name] += loads[model]
        mapped = (replace(r, model=target[r.model]) for r in self.requests)
        return self._changed(mapped, f"{len(ranked)} models mapped onto {len(names)} by {by}")

    def spread_models(self, names: Sequence[str], alpha: float, seed: int = 0) -> Workload:
        """Every request for one of `names`, drawn by a power law: the n-th with a weight of
        n ** -`alpha` (0: all alike). Requests of one session stay together.

        For traces of one service, of which a fleet has many.
        """
        if not names or len(set(names)) != len(names):
            raise WorkloadError(f"model names must be given and distinct: {list(names)!r}")
        if not 0 <= alpha < float("inf"):
            raise WorkloadError(f"spread: {alpha!r}: an exponent of 0 or more")
        rng = random.Random(seed)
        weights = [n**-alpha for n in range(1, len(names) + 1)]
        of_session: dict[str, str] = {}

        def drawn(r: WorkloadRequest) -> str:
            (name,) = rng.choices(names, weights)
            return name if r.session is None else of_session.setdefault(r.session, name)

        spread = (replace(r, model=drawn(r)) for r in self.requests)
        description = f"spread over {len(names)} models by a power law of {alpha:g}, seed {seed}"
        return self._changed(spread, description)

    def window(self, start: float, end: float) -> Workload:
        """The requests of [start, end) seconds, with `start` as the new zero."""
        if not 0 <= start < end:
            raise WorkloadError(f"no window from {start!r} to {end!r} seconds")
        kept = (replace(r, at=r.at - start) for r in self.requests if start <= r.at < end)
        return self._changed(kept, f"seconds {start:g} to {end:g}")

    def _changed(self, requests: Iterable[WorkloadRequest], label: str) -> Workload:
        return Workload.of(self.name, requests, self.source, (*self.labels, label))


def _scaled(tokens: int, factor: float, most: int | None) -> int:
    scaled = max(1, round(tokens * factor))
    return scaled if most is None else min(scaled, most)


def _positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise WorkloadError(f"{what}: {value!r}: it must be positive and finite")
