"""Ballast in `rivals`: one server, one elastic pool for all models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ballast import __version__
from ballast.bench.server_process import serving
from benchmarks.rival_terms import LEVEL, Running, Settings, Terms


@dataclass(frozen=True)
class Ballast:
    """Serves all models. Its budget holds activations as well."""

    name: str = "ours"

    def version(self) -> str:
        return f"ballast {__version__}"

    def settings(self, terms: Terms) -> Sequence[Settings]:
        """Preset and order of compute, tokens of a step, threads, jobs at a time."""
        return [
            _settings(terms, "ballast"),
            _settings(terms, "ballast", step_tokens=128),
            _settings(terms, "ballast", threads=1),
            _settings(terms, "ballast", lanes=2),
            _settings(terms, "balloon"),
            _settings(terms, "lru+deadline"),
        ]

    @contextmanager
    def serving(self, terms: Terms, chosen: Settings, log: Path) -> Iterator[Running]:
        preset, device = chosen.options
        file = log.with_name(f"{log.stem}.yaml")
        level = f"{{ttft: {LEVEL.ttft:g}, tpot: {LEVEL.tpot:g}}}"
        limits = f"{{context: {terms.longest}}}"
        models = (f"  - {{name: {name}, path: {path}}}\n" for name, path in terms.files.items())
        file.write_text(
            f"preset: {preset}\ndevices: [{device}]\n"
            f"defaults: {{slo: {level}, limits: {limits}}}\nmodels:\n{''.join(models)}"
        )
        with serving(file, "--log-level", "error", "--no-changes") as server:
            yield Running(dict.fromkeys(terms.files, server.url), (server.pid,))


def _settings(terms: Terms, preset: str, **device: int) -> Settings:
    page = 256 * 1024
    given = {"budget": terms.budget // page * page, **device}
    text = "".join(f", {key} {value}" for key, value in device.items())
    keys = ", ".join(f"{key}: {value}" for key, value in given.items())
    return Settings(f"{preset}{text}", given["budget"], (preset, f"{{{keys}}}"))
