"""What adding and activating a model cost without a pool of engine shells (Prism, section 5.3).

The paper keeps initialised engines per GPU, as starting one takes tens of seconds. Here one process
serves all models of a device, and a model's address ranges outlive its eviction. One CPU device,
random Llamas in bfloat16, orders over the admin routes:

- `add`: a checkpoint that was never served is read, packed and checked, until it serves.
- `activate`: from the host tier, after an eviction; what it takes beyond the copy of its bytes is
  what an engine shell would save. `copy`: as many bytes copied by this process, into memory that is
  there. `order`: the same order while the weights are there, which is the way to the device alone.

In turns, medians; `fixed`: of the small model, `activate` less `order`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from ballast.bench.server_process import serving
from ballast.core.units import format_bytes
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.llamas import ADMIN_KEY, LLAMA_6M, LLAMA_110M, make_fleet_file

SIZES = (LLAMA_6M, LLAMA_110M)
TIMEOUT = 600.0


class Operator:
    """Orders to a server, and the seconds until they have been carried out."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)

    def add(self, name: str) -> float:
        began = time.perf_counter()
        answer = self._client.post("/admin/models", json={"name": name, "path": name})
        answer.raise_for_status()
        return time.perf_counter() - began

    def remove(self, name: str) -> None:
        self._client.delete(f"/admin/models/{name}", params={"patience": 5}).raise_for_status()

    def activate(self, name: str) -> float:
        began = time.perf_counter()
        self._client.post(f"/admin/models/{name}/activate").raise_for_status()
        return time.perf_counter() - began

    def evict(self, name: str) -> None:
        self._client.post(f"/admin/models/{name}/evict").raise_for_status()


def copied(n_bytes: int) -> Callable[[], float]:
    """Copies so many bytes between buffers that have been written to."""
    source, target = (np.full(n_bytes, value, dtype=np.uint8) for value in (1, 2))

    def copy() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return copy


def measure(operator: Operator, name: str, n_bytes: int, rounds: int) -> dict[str, Samples]:
    """One model that is not served; it is removed in the end."""
    adds = []
    for again in range(max(1, rounds // 4)):
        adds.append(operator.add(name))
        if again < max(1, rounds // 4) - 1:
            operator.remove(name)

    def activated() -> float:
        operator.evict(name)
        return operator.activate(name)

    def ordered() -> float:
        operator.activate(name)
        return operator.activate(name)

    variants = {"activate": activated, "order": ordered, "copy": copied(n_bytes)}
    found = interleave(variants, rounds, warmup=1)
    operator.remove(name)
    return {"add": Samples(tuple(adds)), **found}


def main() -> None:
    args = options(__doc__)
    rounds = 4 if args.quick else 20
    result: dict[str, Any] = {}
    table = Table(
        "model", "weights", "add, s", "activate, ms", "copy, ms", "order, ms", "over copy"
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        served = {"base": LLAMA_6M, **{f"spare-{size.name}": size for size in SIZES}}
        file = make_fleet_file(directory, served)
        with serving(file, "--host", "127.0.0.1") as running:
            operator = Operator(running.url)
            for size in SIZES:
                name = f"spare-{size.name}"
                n_bytes = sum(f.stat().st_size for f in (directory / name).glob("*.safetensors"))
                found = measure(operator, name, n_bytes, rounds)
                taken = found["activate"].median - found["order"].median
                over = taken / found["copy"].median
                result[size.name] = {
                    "bytes": n_bytes,
                    **{f"{what}_seconds": samples.to_json() for what, samples in found.items()},
                    "activation_over_copy": over,
                    "fixed_seconds": taken,
                }
                cells = (f"{1e3 * found[w].median:.2f}" for w in ("activate", "copy", "order"))
                add = f"{found['add'].median:.2f}"
                table.add_row(size.name, format_bytes(n_bytes), add, *cells, f"{over:.2f}")
    result["fixed_seconds"] = result[LLAMA_6M.name]["fixed_seconds"]
    finish(args, "activation", result, table)


if __name__ == "__main__":
    main()
