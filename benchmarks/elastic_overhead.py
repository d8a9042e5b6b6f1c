"""What elasticity costs a model that needs none: pages returned at every finish, or never.

One model at constant load (a closed loop of requests), prefix cache off. `elastic`: the pool is 1.1
times what the load needs; every finished request's pages go back and the next one's are leased.
`mapped once`: the same, but every slab of the KV range stays backed from the start: the pool is
never asked again. Both run in turns, in one process; ratios are round by round, and rounds short
and many, as a shared machine's speed drifts. `processor_ratio` is of processor time per request.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ballast.bench.inprocess import InProcess
from ballast.cluster.machine_choice import machine_of
from ballast.core.event import FinishedOutput, Output
from ballast.core.request import Submission
from ballast.core.settings import GPU_PAGE, DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB, ceil_div
from ballast.live.machine import MakeMachine
from benchmarks.common import finish, interleave, options
from benchmarks.exactness import make_llama

CONCURRENT = 8
PROMPT, OUTPUT = 96, 48
PAGE = 128 * KiB
"""Half the default, so that pages change hands at least a hundred times a second here."""
NAME = "steady"
CEILING = 1.1


class Load:
    """A closed loop on one device, kept from round to round."""

    def __init__(
        self,
        path: Path,
        device: DeviceSettings,
        budget: int,
        *,
        once: bool,
        make: MakeMachine = machine_of,
    ) -> None:
        model = ModelSettings(name=NAME, path=str(path), dtype="bfloat16")
        device = replace(device, budget_bytes=budget, prefix_cache=False)
        fleet = FleetSettings(models=(model,), device=device)
        self.server = InProcess(fleet, make_machine=make)
        self.pages = 0
        """Given back to the pool since the last round began, by the KV cache."""
        self.tpots: list[float] = []
        self.rates: list[float] = []
        self.processor: list[float] = []
        """Seconds per request, of the whole process, by round."""
        self._sent = 0
        self._left = 0
        self._over = threading.Event()
        self.server.listen = self._hear
        self.server.device.populate()
        if once:
            self._back_for_good()
        else:
            self._count_pages()
        self.server.__enter__()
        self.round(2 * CONCURRENT)

    def _back_for_good(self) -> None:
        """One block of every slab stays in use, so that no slab is ever given back."""
        state = self.server.device.state
        kv = state.models[NAME].kv
        slabs = (state.pool.free - state.models[NAME].weights.pages) // kv.layout.slab_pages
        table: list[int] = []
        assert kv.grow(table, slabs * kv.layout.blocks_per_slab * kv.spec.block_tokens) is None
        anchors = {block // kv.layout.blocks_per_slab: block for block in table}
        kv.free([block for block in table if block not in anchors.values()])

    def _count_pages(self) -> None:
        pool = self.server.device.state.pool
        give_back = pool.give_back

        def counted(owner: str, pages: Sequence[int], *rest: object) -> None:
            self.pages += len(pages)
            give_back(owner, pages, *rest)  # type: ignore[arg-type]

        pool.give_back = counted  # type: ignore[method-assign, assignment]

    def round(self, requests: int) -> float:
        """Output tokens per second over `requests` requests, CONCURRENT at a time."""
        self._left, self.pages = requests, 0
        self._over.clear()
        first = self._sent
        begun, spent = self.server.now, time.process_time()
        for _ in range(min(CONCURRENT, requests)):
            self._send()
        self._over.wait()
        seconds = self.server.now - begun
        self.processor.append((time.process_time() - spent) / requests)
        answers = [self.server.answers[f"r{i}"] for i in range(first, self._sent)]
        spans = [(a.times[-1] - a.times[0]) / (len(a.times) - 1) for a in answers]
        self.tpots.append(float(np.percentile(spans, 99)))
        self.rates.append(self.pages / seconds)
        return requests * OUTPUT / seconds

    def _send(self) -> None:
        prompt = tuple((self._sent * 7 + i * 13) % 997 for i in range(PROMPT))
        self.server.submit(
            Submission(
                id=f"r{self._sent}", model=NAME, prompt=prompt, max_tokens=OUTPUT, ignore_eos=True
            )
        )
        self._sent += 1

    def _hear(self, now: float, output: Output) -> None:
        if not isinstance(output, FinishedOutput):
            return
        self._left -= 1
        if self._left >= CONCURRENT:
            self._send()
        elif self._left == 0:
            self._over.set()

    def close(self) -> None:
        self.server.__exit__(None, None, None)


def need(path: Path, device: DeviceSettings, make: MakeMachine = machine_of) -> tuple[int, int]:
    """(bytes that cannot be KV, bytes of KV of CONCURRENT requests at their longest)."""
    settings = FleetSettings(
        models=(ModelSettings(name=NAME, path=str(path), dtype="bfloat16"),),
        device=device,
    )
    with InProcess(settings, make_machine=make) as server:
        state = server.device.state
        m = state.models[NAME]
        kv = m.kv.layout.pages(CONCURRENT * ceil_div(PROMPT + OUTPUT, m.spec.block_tokens))
        page = settings.device.page_bytes
        return (state.set_aside + m.weights.pages) * page, kv * page


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--device", default="cpu:0", metavar="NAME", help="cuda:0: a GPU")

    args = options(__doc__, extra=extra)
    device = DeviceSettings(name=args.device, budget_bytes=1024 * MiB)
    device = replace(device, page_bytes=PAGE if device.gpu is None else GPU_PAGE)
    rounds, requests = (20, 48) if args.quick else (40, 48)
    with tempfile.TemporaryDirectory() as scratch:
        path = make_llama(
            Path(scratch) / "m",
            0,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        fixed, kv = need(path, device)
        elastic = Load(path, device, fixed + int(CEILING * kv), once=False)
        # Anchors take a block of each slab: the reference gets the room they cost.
        once = Load(path, device, fixed + 2 * kv, once=True)
        samples = interleave(
            {"elastic": lambda: elastic.round(requests), "once": lambda: once.round(requests)},
            rounds,
        )
        preemptions = elastic.server.device.snapshot().models[0].preemptions
        elastic.close()
        once.close()
    ratio = samples["elastic"].over(samples["once"])
    tpot = np.array(elastic.tpots[1:]) / np.array(once.tpots[1:])
    processor = np.array(elastic.processor[1:]) / np.array(once.processor[1:])
    result = {
        "throughput_ratio": ratio.median,
        "throughput_ratio_rounds": ratio.to_json(),
        "processor_ratio": float(np.median(processor)),
        "p99_tpot_ratio": float(np.median(tpot)),
        "p99_tpot_ratios": [float(x) for x in tpot],
        "page_hand_overs_per_second": float(np.median(elastic.rates[1:])),
        "tokens_per_second": samples["elastic"].median,
        "page_bytes": device.page_bytes,
        "preemptions": preemptions,
        "goal_met": ratio.median >= 0.98 and float(np.median(elastic.rates[1:])) >= 100,
    }
    finish(args, "elastic_overhead", result)


if __name__ == "__main__":
    main()
