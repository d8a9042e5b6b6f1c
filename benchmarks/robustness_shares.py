"""What one key does to others: going round all models, filling the prefix cache, leaving.

The servers are the attacks' own, with less memory than their models take. Each attack is (name,
what is expected, what does it, whether a witness must not notice).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ballast.bench.server_process import serving
from ballast.fleet.make import make_fleet
from benchmarks.robustness_target import ADMIN_KEY, ATTACKER_KEY, OTHER_KEY, Target

MODELS = 6
PER_MINUTE = 12
THREADS = 4
SECONDS = 10.0
PATIENCE_SECONDS = 3.0
"""After which an attacker's client leaves, whatever it was promised."""
BUDGET, BANDWIDTH = "4MiB", "20MB/s"
"""Some two models fit, and one takes 50 ms to come."""
SLOW = "2MB/s"
"""One takes 0.5 s to come: nobody who leaves can have been too late."""
FLOOD = 600
"""Prompts of 200 tokens, of which the cache holds a third."""
LEAVING_SECONDS = 0.02
SECTION = f"""
server:
  keys:
    - {{name: attacker, key: {ATTACKER_KEY}, activations_per_minute: {PER_MINUTE}}}
    - {{name: other, key: {OTHER_KEY}}}
  admin_key: {ADMIN_KEY}
  drain_seconds: 1
"""


@contextmanager
def _crowded(target: Target, bandwidth: str = BANDWIDTH) -> Iterator[tuple[Target, list[str]]]:
    """A server whose models take more memory than there is, and their names."""
    directory = target.fleet_file.parent / f"crowded-{time.monotonic_ns()}"
    made = make_fleet(
        directory, n_models=MODELS, steps=0, size="tiny", dtype="float32", seed=1, budget=BUDGET
    )
    file = Path(made.file)
    file.write_text(f"{file.read_text()}\nlinks: [{{bandwidth: {bandwidth}}}]\n{SECTION}")
    with serving(file, "--no-changes", "--log-level", "error") as running:
        second = Target(running.url, running.pid, file, target.log)
        _, listed = second.ask("GET", "/v1/models", key=OTHER_KEY)
        yield second, [m["id"] for m in listed["data"]]


def _models(target: Target) -> dict[str, dict[str, Any]]:
    """Reports of the models, by name."""
    _, state = target.ask("GET", "/admin/state", key=ADMIN_KEY)
    return {m["report"]["name"]: m["report"] for m in state["models"]}


def _activations(target: Target) -> int:
    return sum(m["activations"] for m in _models(target).values())


def goes_round(target: Target) -> str:
    """Ask all models in turn, and leave where none answers soon; another key asks one of them."""
    with _crowded(target) as (second, models):
        before, over = _activations(second), threading.Event()

        def attack(offset: int) -> None:
            for model in itertools.cycle(models[offset:] + models[:offset]):
                if over.is_set():
                    return
                with contextlib.suppress(OSError):
                    body = {"model": model, "prompt": [40], "max_tokens": 1}
                    second.ask("POST", "/v1/completions", body, ATTACKER_KEY, PATIENCE_SECONDS)

        threads = [threading.Thread(target=attack, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        statuses, times = [], []
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            statuses.append(second.complete(OTHER_KEY, model=models[-1])[0])
            times.append(time.monotonic() - began)
            time.sleep(0.2)
        over.set()
        for thread in threads:
            thread.join()
        caused = _activations(second) - before
    allowed = PER_MINUTE * (1 + (SECONDS + PATIENCE_SECONDS) / 60)
    seen = f"{caused} activations; another key {len(statuses)} answers, {max(times):.2f} s at most"
    assert set(statuses) == {200}, f"{seen}; {statuses}"
    # Each of the attacker's may have evicted the model of the other, which had it back.
    assert caused <= 2 * allowed + 1, seen
    return seen


def leaves(target: Target) -> str:
    """Ask for absent models, and leave before they are there."""
    with _crowded(target, SLOW) as (second, models):
        for model in models:
            with contextlib.suppress(OSError):
                body = {"model": model, "prompt": [40], "max_tokens": 1}
                second.ask("POST", "/v1/completions", body, ATTACKER_KEY, LEAVING_SECONDS)
        time.sleep(2.0)
        states = {name: m["residency"] for name, m in _models(second).items()}
        status, _ = second.complete(OTHER_KEY, model=models[-1])
    left = [name for name, state in states.items() if state != "absent"]
    seen = f"{len(left)} of {len(models)} models are there; another key {status}"
    assert not left, f"{seen}: {states}"
    assert status == 200, seen
    return seen


def fills_the_cache(target: Target) -> str:
    """Fill the prefix cache until own prompts are gone; another key's must still be cached."""

    def cached(key: str, n: int) -> int:
        prompt = [40 + n % 200, 40 + n // 200, *range(40, 238)]
        status, answer = second.complete(key, model=model, prompt=prompt, max_tokens=1)
        assert status == 200, f"{status}: {answer}"
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    with _crowded(target) as (second, models):
        model = models[-1]
        cached(OTHER_KEY, 0)
        for n in range(1, FLOOD):
            cached(ATTACKER_KEY, n)
        shares = _models(second)[model]["cached_pages_of"]
        own, first = cached(OTHER_KEY, 0), cached(ATTACKER_KEY, 1)
    seen = f"the other key finds {own} tokens, the flood {first}; pages of keys {shares}"
    assert first == 0, f"{seen}: the cache was not full"
    assert own > 0, seen
    return seen


SHARE_ATTACKS: tuple[tuple[str, str, Callable[[Target], str], bool], ...] = (
    ("a key that goes round all models", "within its budget", goes_round, False),
    ("clients that leave before their models are there", "absent", leaves, False),
    ("a key that fills the prefix cache", "others keep theirs", fills_the_cache, False),
)
