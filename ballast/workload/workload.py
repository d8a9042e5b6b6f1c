"""Define `Workload`: requests with model, arrival time and token counts; and pure transforms of it.

A workload holds lengths, not text: `ballast.workload.prompts` makes token ids from it. Every
transform returns a new workload and adds a label that describes the change, so that a report can
state what was run. Request ids survive all transforms but `merge`. Used by `bench` and benchmarks;
the engine sees only submissions made from it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ballast.core.errors import BallastError
from ballast.core.units import ceil_div
from ballast.workload.cuts import cut_prompt, cut_text
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


def repeated_tokens(requests: Iterable[WorkloadRequest]) -> Iterator[int]:
    """Yield, for each request, the tokens at its prompt's beginning that a request before it, for
    the same model, has at its own."""
    seen: set[int] = set()
    for request in requests:
        name, repeated = hash(request.model), 0
        for n, block in enumerate(request.prefix_blocks or (), 1):
            name = hash((name, block))
            if name in seen:
                repeated = n
            seen.add(name)
        yield min(repeated * request.block_tokens, request.prompt_tokens)


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

    @classmethod
    def apart(cls, workloads: Sequence[Workload]) -> Workload:
        """Several workloads at once, as `merge`, whose models and sessions are never the same: of
        several they bear the workload's name, or its place where names recur."""
        if len(workloads) == 1:
            return workloads[0]
        names = [w.name for w in workloads]
        if len(set(names)) < len(names):
            names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]
        renamed = [
            replace(w, name=name, requests=tuple(_prefixed(r, name) for r in w.requests))
            for name, w in zip(names, workloads, strict=True)
        ]
        return cls.merge("traces", renamed)

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

        Shared blocks shrink with their prompts, so that the shared share stays about the same; of
        a prompt that is too long, `cut_prompt` leaves blocks out. A label counts what was cut.
        """
        _positive("prompt factor", prompt_factor)
        _positive("output factor", output_factor)
        most = {"prompt": max_prompt, "output": max_output}
        for what, bound in most.items():
            _positive(f"max_{what}", 1 if bound is None else bound)
        factors = {"prompt": prompt_factor, "output": output_factor}
        changed = [f"{what} x{factor:g}" for what, factor in factors.items() if factor != 1]
        scaled = [_scaled(r, prompt_factor, output_factor) for r in self.requests]
        cut = [_cut(r, max_prompt, max_output) for r in scaled]
        labels = [f"lengths: {', '.join(changed)}"] if changed else []
        return self._relabelled(cut, *labels, *_cut_labels(scaled, cut, most))

    def within(self, most: int) -> Workload:
        """Prompt and output of each request at most `most` tokens together: outputs at most half of
        it, prompts at most the rest. Labels count what was cut."""
        _positive("most tokens", most)
        outputs = [_cut(r, None, max(1, most // 2)) for r in self.requests]
        cut = [_cut(r, max(1, most - r.output_tokens), None) for r in outputs]
        bounds = {"prompt": most, "output": max(1, most // 2)}
        return self._relabelled(cut, *_cut_labels(self.requests, cut, bounds))

    def first(self, n: int) -> Workload:
        """The first `n` requests."""
        label = f"the first {n} of {len(self.requests)} requests"
        return self._relabelled(self.requests[:n], *([label] if n < len(self.requests) else []))

    def labelled(self, label: str) -> Workload:
        """The same requests, with one label more."""
        return replace(self, labels=(*self.labels, label))

    def only_models(self, names: Sequence[str]) -> Workload:
        """The requests of these models. Raises WorkloadError for one that it has not."""
        missing = [name for name in names if name not in self.models]
        if missing or not names:
            known = ", ".join(self.models)
            raise WorkloadError(f"{self.name} has no model {', '.join(missing)}; it has {known}")
        kept = (r for r in self.requests if r.model in names)
        return self._relabelled(kept, f"only {', '.join(names)} of {len(self.models)} models")

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
        return self._relabelled(requests, label)

    def _relabelled(self, requests: Iterable[WorkloadRequest], *labels: str) -> Workload:
        return Workload.of(self.name, requests, self.source, (*self.labels, *labels))


def _prefixed(r: WorkloadRequest, name: str) -> WorkloadRequest:
    session = None if r.session is None else f"{name}/{r.session}"
    return replace(r, model=f"{name}/{r.model}", session=session)


def _scaled(r: WorkloadRequest, prompt_factor: float, output_factor: float) -> WorkloadRequest:
    prompt = max(1, round(r.prompt_tokens * prompt_factor))
    output = max(1, round(r.output_tokens * output_factor))
    if not r.prefix_blocks:
        return replace(r, prompt_tokens=prompt, output_tokens=output)
    size = max(1, round(r.block_tokens * prompt_factor))
    blocks = r.prefix_blocks[: ceil_div(prompt, size)]
    return replace(
        r, prompt_tokens=prompt, output_tokens=output, prefix_blocks=blocks, block_tokens=size
    )


def _cut(r: WorkloadRequest, max_prompt: int | None, max_output: int | None) -> WorkloadRequest:
    output = r.output_tokens if max_output is None else min(r.output_tokens, max_output)
    if max_prompt is None or r.prompt_tokens <= max_prompt:
        return r if output == r.output_tokens else replace(r, output_tokens=output)
    if not r.prefix_blocks:
        return replace(r, prompt_tokens=max_prompt, output_tokens=output)
    left = cut_prompt(r.prompt_tokens, r.prefix_blocks, r.block_tokens, max_prompt)
    return replace(r, prompt_tokens=left.tokens, output_tokens=output, prefix_blocks=left.blocks)


def _cut_labels(
    before: Sequence[WorkloadRequest],
    after: Sequence[WorkloadRequest],
    most: Mapping[str, int | None],
) -> list[str]:
    """What was cut, of prompts and of outputs."""
    found = []
    for what, bound in most.items():
        lengths, cut = ([getattr(r, f"{what}_tokens") for r in rs] for rs in (before, after))
        found.append("" if bound is None else cut_text(what, lengths, cut, bound))
    return [text for text in found if text]


def _positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise WorkloadError(f"{what}: {value!r}: it must be positive and finite")
