"""What a device's memory is worth to the rest of the machine while its models are idle.

One model with a time to live of a second, served by `ballast serve` in a process of its own, with
`keep_free: 0` and without it, in turns. `bytes`: what the device's file holds, as the system sees
it: while the model works, and once it has left and its pages have been free for ten seconds.
`first_token_s`: of a request that brings the model back, each of its own. `taken_again_s`: how much
later that is where the pages' memory had gone back, and is taken again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ballast.bench.server_process import children_of, serving
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from benchmarks.common import Samples, finish, options
from benchmarks.raw_http import Connections
from benchmarks.single_model import SIZES
from benchmarks.switch import first_token

LATEST = 25.0
"""Seconds after which memory that has not gone back is said to stay."""
KINDS = {"kept": "", "given back": "keep_free: 0, "}


@contextmanager
def served(directory: Path, kind: str, weights: int) -> Iterator[tuple[Connections, int]]:
    """Serve the model; yields connections and the server's process id."""
    file = directory / f"{kind}.yaml"
    file.write_text(
        f"preset: balloon\ndevices: [{{{KINDS[kind]}budget: {(weights >> 20) + 64}MiB}}]\n"
        "models: [{name: a, path: a, ttl: 1}]\n"
    )
    with (
        serving(file, "--log-level", "warning", "--no-changes") as running,
        Connections(running.url, 1) as connections,
    ):
        yield connections, running.pid


def device_bytes(pid: int) -> int:
    """Return the memory of the server's device files, whichever process has them open."""
    found: dict[int, int] = {}
    for process in children_of(pid):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(link) == "/memfd:ballast (deleted)":
                    stat = link.stat()
                    found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def least_bytes(pid: int, goal: int) -> int:
    """Wait until the device holds no more than `goal` bytes; returns the least seen."""
    least, until = device_bytes(pid), time.monotonic() + LATEST
    while least > goal and time.monotonic() < until:
        time.sleep(0.25)
        least = min(least, device_bytes(pid))
    return least


def measure(rounds: int, directory: Path) -> dict[str, Any]:
    tokenizer = train_tokenizer(documents(), 4000, 1024)
    SIZES[0].make(directory / "a", 0)
    tokenizer.save_pretrained(directory / "a")
    weights = sum(f.stat().st_size for f in (directory / "a").glob("*.safetensors"))
    result: dict[str, Any] = {"weights_bytes": weights}
    for kind in KINDS:
        busy, idle, first = [], [], []
        with served(directory, kind, weights) as (connections, pid):
            for i in range(rounds + 1):
                seconds = first_token(connections, "a", [10 + i] * 16)
                if i:
                    first.append(seconds)
                busy.append(device_bytes(pid))
                idle.append(least_bytes(pid, weights // 8))
        result[kind] = {
            "busy_bytes": max(busy),
            "idle_bytes": max(idle),
            "first_token_s": Samples(tuple(first)).median,
        }
    return result


def main() -> None:
    args = options(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(2 if args.quick else 7, Path(scratch))
    given = found["given back"]
    keys = {
        "idle_over_busy": given["idle_bytes"] / given["busy_bytes"],
        "first_token_over_kept": given["first_token_s"] / found["kept"]["first_token_s"],
        "taken_again_s": given["first_token_s"] - found["kept"]["first_token_s"],
    }
    finish(args, "memory_back", {**keys, **found})


if __name__ == "__main__":
    main()
