"""How long a model takes to join a second device whose worker reads it, or takes what it made.

Random Llamas in bfloat16 on one of two devices of a server. `held`: the other one takes the model's
segments from the first's worker; `read`: its files' times have changed meanwhile, so it reads and
packs them, and finds then that they are the same. Seconds from the order to its answer, when the
device takes requests; in turns, medians over rounds. The model leaves after each.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ballast.cluster.controller import Controller
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.core.command import CommandOutcome
from ballast.core.fleet_orders import Place, Withdraw
from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
    ServerSettings,
)
from ballast.core.units import GiB, format_bytes
from ballast.weights.origin import QUIET_SECONDS
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.single_model import SIZES

MODEL, FIRST, SECOND = "llama", "cpu:0", "cpu:1"


def fleet(directory: Path) -> FleetSettings:
    """The model on the first of two devices."""
    device = DeviceSettings(name=FIRST, budget_bytes=2 * GiB, threads=1)
    return FleetSettings(
        models=(ModelSettings(name=MODEL, path=str(directory), devices=(FIRST,)),),
        device=device,
        others=(DeviceSettings(name=SECOND, budget_bytes=2 * GiB, threads=1),),
        other_links=(LinkSettings(device=SECOND),),
        server=ServerSettings(spare_worker=False),
    )


def done(outcome: CommandOutcome) -> None:
    assert outcome.code is None, outcome


async def joined(controller: Controller) -> float:
    began = time.perf_counter()
    done(await controller.commands.execute(Place(MODEL, SECOND)))
    seconds = time.perf_counter() - began
    done(await controller.commands.execute(Withdraw(MODEL, SECOND, seconds=0.0)))
    return seconds


async def touched(controller: Controller, directory: Path) -> float:
    for file in directory.glob("*.safetensors"):
        os.utime(file)
    await asyncio.sleep(1.1 * QUIET_SECONDS)
    return await joined(controller)


def measure(directory: Path, rounds: int) -> dict[str, Samples]:
    with asyncio.Runner() as runner:
        broker = SegmentBroker()
        controller = Controller(LocalWorkers(lambda: LocalWorker(broker=broker)))
        try:
            runner.run(controller.start(fleet(directory)))
            variants: dict[str, Callable[[], float]] = {
                "held": lambda: runner.run(joined(controller)),
                "read": lambda: runner.run(touched(controller, directory)),
            }
            return interleave(variants, rounds, warmup=1)
        finally:
            runner.run(controller.close(5.0))


def main() -> None:
    args = options(__doc__)
    result: dict[str, Any] = {}
    table = Table("model", "weights", "read, s", "held, s", "read / held")
    for size in SIZES[:1] if args.quick else SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            size.make(directory)
            n_bytes = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
            time.sleep(QUIET_SECONDS)
            found = measure(directory, 2 if args.quick else 5)
        times = found["read"].over(found["held"])
        result[size.name] = {
            "bytes": n_bytes,
            **{f"{name}_seconds": samples.to_json() for name, samples in found.items()},
            "read_over_held": times.to_json(),
        }
        cells = (f"{found[name].median:.3f}" for name in ("read", "held"))
        table.add_row(size.name, format_bytes(n_bytes), *cells, f"{times.median:.1f}")
    finish(args, "join", result, table)


if __name__ == "__main__":
    main()
