"""What it costs that no text in bfloat16 depends on what else is served, on a CPU.

One random Llama in bfloat16 in two children: `invariant: 1`, where our kernels multiply always, and
`invariant: 0`, where oneDNN takes over from as many rows on as measured on this machine, anew for
this run (`from_rows`, by matrix; none: never, and both are then the same). They take turns of
seconds, the other standing still (`benchmarks.turns`), at 1 and at 16 streams and, for prefill,
with one prompt of 1,024 tokens.

`tokens_ratio.1`, `.16`: tokens per second, prompts included, over those of `invariant: 0`;
`prefill_ratio`: prompt tokens per second, likewise. `goals`: 0.97, 0.97 and 0.9.

    python -m benchmarks.invariant_cost --size 110M --quick
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.kernels import choice_file, choices
from benchmarks.common import finish, options, verdict
from benchmarks.single_model import SIZES, prompts
from benchmarks.turns import Contestant, Run, contest

OURS, FREE = "invariant", "free"
GOALS = {"tokens_ratio.1": 0.97, "tokens_ratio.16": 0.97, "prefill_ratio": 0.9}
TURNS = 6
"""That the slower one needs for a run, at least."""
TURN_SECONDS = 2.0


@dataclass(frozen=True)
class Phase:
    """What is asked at once, and how often."""

    name: str
    streams: int
    prompt: int
    output: int
    runs: int


PHASES = (
    Phase("tokens_ratio.1", 1, 128, 128, 2),
    Phase("tokens_ratio.16", 16, 128, 64, 2),
    Phase("prefill_ratio", 1, 1024, 2, 6),
)


def rate(runs: Sequence[Run], phase: Phase) -> float:
    """Tokens per second of all runs: those of the prompt, where it is prefill that is measured."""
    if phase.name == "prefill_ratio":
        return sum(r.prompt_tokens for r in runs) / sum(r.prefill for r in runs)
    return sum(r.new_tokens for r in runs) / sum(r.seconds for r in runs)


def measure(contestants: Sequence[Contestant], phase: Phase, quick: bool) -> dict[str, Any]:
    """A warm-up of each by itself, then its runs in turns."""
    asked = prompts(phase.streams, phase.prompt)
    output = max(2, phase.output // 4) if quick else phase.output
    slices = {}
    for c in contestants:
        c.ask(asked, output)
        while (run := c.turn(60.0)) is None:
            pass
        slices[c.name] = run.seconds
    turns = max(TURNS, max(slices.values()) * phase.runs / TURN_SECONDS)
    slices = {name: seconds * phase.runs / turns for name, seconds in slices.items()}
    runs = 1 if quick else phase.runs
    found = contest(contestants, asked, output, slices, lambda: None, runs)
    rates = {name: rate(of, phase) for name, of in found.items()}
    steps = {
        name: statistics.median(s.seconds for r in of for s in r.steps)
        for name, of in found.items()
    }
    pairs = zip(found[OURS], found[FREE], strict=True)
    by_run = [rate([a], phase) / rate([b], phase) for a, b in pairs]
    return {
        "ratio": rates[OURS] / rates[FREE],
        "ratio_by_run": by_run,
        "tokens_per_second": rates,
        "decode_step_seconds": steps,
    }


def chosen(file: Path) -> dict[str, dict[str, Any]]:
    """By matrix: `from_rows`, and oneDNN's time over ours by number of rows, as was measured."""
    machines = json.loads(file.read_text())["machines"] if file.is_file() else {}
    return {name: of for kept in machines.values() for name, of in kept["choices"].items()}


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        names = [s.name for s in SIZES]
        parser.add_argument("--size", choices=names, default=names[-1], help="default: the larger")

    args = options(__doc__, argv, extra)
    size = next(s for s in SIZES if s.name == args.size)
    with tempfile.TemporaryDirectory() as scratch:
        path, log = Path(scratch) / "model", Path(scratch) / "children.log"
        file = Path(scratch) / "choices.json"
        os.environ[choice_file.VARIABLE] = str(file)  # of the children: measured anew
        size.make(path)
        contestants: list[Contestant] = []
        try:
            for name, invariant in ((FREE, "0"), (OURS, "1")):
                module = "benchmarks.child_ballast"
                arguments = [str(path), "auto", invariant]
                contestants.append(Contestant(name, module, arguments, log))
            phases = {p.name: measure(contestants, p, args.quick) for p in PHASES}
        finally:
            for c in contestants:
                c.close()
        from_rows = chosen(file)
    ratios = {name: of["ratio"] for name, of in phases.items()}
    result = {
        "model": size.name,
        "tokens_ratio": {"1": ratios["tokens_ratio.1"], "16": ratios["tokens_ratio.16"]},
        "prefill_ratio": ratios["prefill_ratio"],
        "goals": {name: verdict(ratios[name], at_least=goal) for name, goal in GOALS.items()},
        "invariant_by_default": choices.is_invariant(None),
        "from_rows": from_rows,
        "phases": phases,
    }
    finish(args, "invariant_cost", result)


if __name__ == "__main__":
    main()
