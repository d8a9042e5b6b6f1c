"""Draw requests from ServeGen's public client statistics (windowed rates, length distributions).

The data holds no requests: for each client of a model and each 600 s window a rate, a CV and a
fitted distribution of gaps (Gamma or Weibull, as shape and scale). Drawn requests keep the rate of
each window and the *shape* of its gaps; the fitted scales disagree with the stated rates, and the
rates win. Gaps continue across the ends of windows in operational time (expected requests so far),
so that a client does not start afresh every ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gamma
from pathlib import Path

import msgspec
import numpy as np

from ballast.workload.lengths import Empirical
from ballast.workload.trace_lines import errors_at, number, read_lines, read_rows
from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest

WINDOW_SECONDS = 600.0
DAY_SECONDS = 86_400.0
_MODEL_WIDE = ""
_LENGTHS, _THINNED = 1, 2
"""What is drawn by chance beside arrivals; each has random numbers of its own."""
_TRIES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeGenSample:
    """Parameters of a sample."""

    start: float = 0.0
    """Seconds into the data."""
    seconds: float = 600.0
    rate: float | None = 10.0
    """Mean requests per second over all models; None: as recorded (thousands)."""
    models: tuple[str, ...] | None = None
    """Models to draw from; None: all."""
    lengths: Path | None = None
    """File of token-length distributions; None: the one `*length*.jsonl*` beside the rates."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.start >= 0 and 0 < self.seconds < float("inf")):
            raise WorkloadError(f"servegen: no {self.seconds!r} s from {self.start!r} s on")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise WorkloadError(f"servegen: rate {self.rate!r}: positive")


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """One client's behaviour for WINDOW_SECONDS from `start` on."""

    start: float
    rate: float
    """Requests per second."""
    cv: float
    pattern: str
    """`Gamma`, `Weibull`, or empty where too few requests were seen to fit one."""
    shape: float

    def gap(self, rng: np.random.Generator) -> float:
        """One gap between requests, in units of the mean gap."""
        if self.pattern == "Gamma" and self.shape > 0:
            return rng.gamma(self.shape) / self.shape
        if self.pattern == "Weibull" and self.shape > 0:
            return rng.weibull(self.shape) / gamma(1 + 1 / self.shape)
        return rng.exponential()


Client = tuple[str, str]
"""Model and client id."""


class LengthBook:
    """Prompt and output lengths by client and time of day, with the model's pool for the rest."""

    def __init__(self, path: Path) -> None:
        self._windows: dict[Client, list[tuple[float, Empirical, Empirical]]] = {}
        self.without_text = 0
        """Lines that do not say how many tokens a prompt or an output has: those of images, audio
        and video. Their clients get the lengths of their model, where others have any."""
        pools: dict[tuple[str, float], list[tuple[dict[int, float], dict[int, float]]]] = {}
        decode = msgspec.json.Decoder(_LengthLine, strict=False).decode
        for line, text in read_lines(path):
            with errors_at(path, line):
                row = decode(text)
                if row.input_tokens is None or row.output_tokens is None:
                    self.without_text += 1
                    continue
                pair = (_pdf(row.input_tokens), _pdf(row.output_tokens))
                if not (pair[0] and pair[1]):
                    continue
                time_of_day = row.window_start % DAY_SECONDS
                self._add((row.model, str(row.client_id)), time_of_day, *pair)
                pools.setdefault((row.model, time_of_day), []).append(pair)
        for (model, time_of_day), pairs in pools.items():
            self._add(
                (model, _MODEL_WIDE),
                time_of_day,
                _mixture([p for p, _ in pairs]),
                _mixture([o for _, o in pairs]),
            )
        if not self._windows:
            raise WorkloadError("holds no length distributions", str(path))

    def _add(
        self, client: Client, time_of_day: float, prompt: dict[int, float], output: dict[int, float]
    ) -> None:
        samplers = (time_of_day, Empirical.of_pdf(prompt), Empirical.of_pdf(output))
        self._windows.setdefault(client, []).append(samplers)

    def knows(self, client: Client) -> bool:
        """Whether the client has length distributions of its own."""
        return client in self._windows

    def samplers(self, client: Client, at: float) -> tuple[Empirical, Empirical]:
        """Return the length distributions of the latest window that began before this time of day;
        raises WorkloadError."""
        windows = self._windows.get(client) or self._windows.get((client[0], _MODEL_WIDE))
        if windows is None:
            raise WorkloadError(f"no token lengths for model {client[0]!r}")
        time_of_day = at % DAY_SECONDS
        _, prompt, output = min(windows, key=lambda w: (time_of_day - w[0]) % DAY_SECONDS)
        return prompt, output


class _LengthLine(msgspec.Struct):
    model: str
    client_id: str | int
    window_start: float
    input_tokens: str | None = None
    output_tokens: str | None = None


def sample_servegen(rates: Path, sample: ServeGenSample) -> Workload:
    """Draws requests for `sample.seconds` from `sample.start` on: as many as the rate makes of
    these seconds, where there is one. Raises WorkloadError."""
    clients = _read_clients(rates, sample)
    expected = sum(w.rate * _overlap(w, sample) for windows in clients.values() for w in windows)
    if not expected:
        raise WorkloadError("no client sends anything in the time asked for", str(rates))
    arrivals = _Arrivals(clients, sample)
    scale, times = arrivals.drawn(expected)
    book = LengthBook(sample.lengths or _lengths_beside(rates))
    drawn: list[tuple[float, str, str, int, int]] = []
    pooled = 0
    for place, client in enumerate(sorted(clients)):
        rng = np.random.default_rng([sample.seed, place, _LENGTHS])
        pooled += 0 if book.knows(client) else len(times[client])
        for at in times[client]:
            prompt, output = book.samplers(client, at)
            lengths = (int(prompt.sample(rng, 1)[0]), int(output.sample(rng, 1)[0]))
            drawn.append((at - sample.start, *client, *lengths))
    requests = (
        WorkloadRequest(
            id=n,
            at=at,
            model=model,
            prompt_tokens=prompt,
            output_tokens=output,
            session=f"{model}/{client}",
        )
        for n, (at, model, client, prompt, output) in enumerate(sorted(drawn))
    )
    labels = _labels(sample, scale, pooled, book)
    source = "Alibaba ServeGen, Apache-2.0"
    return Workload.of(rates.name.split(".")[0], requests, source, tuple(labels))


def _labels(sample: ServeGenSample, scale: float, pooled: int, book: LengthBook) -> list[str]:
    labels = [
        f"drawn from client statistics, seconds {sample.start:g} to "
        f"{sample.start + sample.seconds:g}, seed {sample.seed}"
    ]
    if sample.models is not None:
        labels.append(f"only {', '.join(sample.models)}")
    if sample.rate is not None:
        labels.append(f"rates x{scale:.4g}")
    if pooled:
        labels.append(f"{pooled} requests of clients without lengths of their own: the model's")
    if book.without_text:
        labels.append(f"{book.without_text} lines of lengths without prompt or output left out")
    return labels


class _Arrivals:
    """Arrival times of all clients, in seconds of the data."""

    def __init__(self, clients: dict[Client, list[ClientWindow]], sample: ServeGenSample) -> None:
        self._clients, self._sample = clients, sample

    def drawn(self, expected: float) -> tuple[float, dict[Client, list[float]]]:
        """Return (factor of the recorded rates, times by client).

        Bursts are such that a rate alone may bring a third of the requests that it makes on
        average, or three times as many. So the factor is corrected until enough of them come, and
        of those that are too many, some are left out by chance. `expected`: requests of the
        recorded rates, on average.
        """
        sample = self._sample
        if sample.rate is None:
            return 1.0, self._at(1.0)
        due = max(1, round(sample.rate * sample.seconds))
        scale = due / expected
        enough: tuple[int, float] | None = None
        for _ in range(_TRIES):
            n = sum(map(len, self._at(scale).values()))
            if n >= due and (enough is None or n < enough[0]):
                enough = n, scale
            if due <= n <= 1.05 * due or (n < due and enough is not None):
                break
            scale *= min(2.0, max(0.5, 1.02 * due / max(n, 1)))
        if enough is None:
            raise WorkloadError(f"servegen: no {due} requests could be drawn in {sample.seconds} s")
        return enough[1], self._thinned(self._at(enough[1]), due)

    def _thinned(self, times: dict[Client, list[float]], due: int) -> dict[Client, list[float]]:
        every = [(client, at) for client in sorted(times) for at in times[client]]
        rng = np.random.default_rng([self._sample.seed, _THINNED])
        kept = np.sort(rng.choice(len(every), due, replace=False)).tolist()
        found: dict[Client, list[float]] = {client: [] for client in times}
        for i in kept:
            client, at = every[i]
            found[client].append(at)
        return found

    def _at(self, scale: float) -> dict[Client, list[float]]:
        """Times with the recorded rates times `scale`; equal seeds give equal gaps."""
        found = {}
        for place, client in enumerate(sorted(self._clients)):
            rng = np.random.default_rng([self._sample.seed, place])
            found[client] = list(_arrivals(self._clients[client], self._sample, scale, rng))
        return found


def _read_clients(path: Path, sample: ServeGenSample) -> dict[Client, list[ClientWindow]]:
    """Read the windows that overlap the sample, by client."""
    clients: dict[Client, list[ClientWindow]] = {}
    known: set[str] = set()
    for line, row in read_rows(path):
        with errors_at(path, line):
            known.add(row["model"])
            if sample.models is not None and row["model"] not in sample.models:
                continue
            window = ClientWindow(
                number(row, "timestamp"),
                number(row, "rate"),
                number(row, "cv"),
                row["pat_name"],
                number(row, "pat_arg1"),
            )
            if window.pattern not in ("", "Gamma", "Weibull"):
                raise ValueError(f"pat_name: {window.pattern!r} is neither Gamma nor Weibull")
        if window.rate > 0 and _overlap(window, sample) > 0:
            clients.setdefault((row["model"], row["client_id"]), []).append(window)
    missing = [name for name in sample.models or () if name not in known]
    if missing:
        fault = f"no model {', '.join(missing)}: it has {', '.join(sorted(known))}"
        raise WorkloadError(fault, str(path))
    for windows in clients.values():
        windows.sort(key=lambda w: w.start)
    return clients


def _overlap(window: ClientWindow, sample: ServeGenSample) -> float:
    """Seconds of the window inside the sample; 0 or less: none."""
    begin = max(window.start, sample.start)
    return max(0.0, min(window.start + WINDOW_SECONDS, sample.start + sample.seconds) - begin)


def _arrivals(
    windows: list[ClientWindow], sample: ServeGenSample, scale: float, rng: np.random.Generator
) -> Iterator[float]:
    """Arrival times of one client; gaps carry over from window to window."""
    left = windows[0].gap(rng) * rng.random()
    for window in windows:
        at = max(window.start, sample.start)
        end = at + _overlap(window, sample)
        rate = window.rate * scale
        while at + left / rate < end:
            at += left / rate
            yield at
            left = window.gap(rng)
        left -= (end - at) * rate


def _lengths_beside(rates: Path) -> Path:
    found = sorted(rates.parent.glob("*length*.jsonl*"))
    if len(found) != 1:
        fault = f"{len(found)} files *length*.jsonl* beside it; name the one to use"
        raise WorkloadError(fault, str(rates))
    return found[0]


def _pdf(text: str) -> dict[int, float]:
    """`{tokens: probability}` as the data spells it, empty for an idle window; or ValueError."""
    pdf: dict[int, float] = {}
    try:
        inside = text.strip().removeprefix("{").removesuffix("}")
        for entry in inside.split(",") if inside else ():
            tokens, probability = entry.split(":")
            pdf[int(tokens)] = float(probability)
    except ValueError as error:
        raise ValueError(f"not a distribution: {text[:40]!r}") from error
    return {tokens: p for tokens, p in pdf.items() if p > 0}


def _mixture(pdfs: list[dict[int, float]]) -> dict[int, float]:
    """Their mean, each client counting alike."""
    mixed: dict[int, float] = {}
    for pdf in pdfs:
        for tokens, probability in pdf.items():
            mixed[tokens] = mixed.get(tokens, 0.0) + probability
    return mixed
