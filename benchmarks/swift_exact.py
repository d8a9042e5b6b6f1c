"""SwiftCache's worked examples, and whether KV that moves ever changes a token.

`worked`: numbers that the paper and `CLAIMS.md` state, of equations 1 to 9, table 2 and Algorithm
1, computed by the code that presets use.

`exact`: a random Llama in float32, greedy and sampled requests in turns; tokens beside those of a
device with room for all, which keeps nothing. Each case has its own prompts, and says by what
number it `happened`:

- `streamed`: preset `swiftcache`, a context longer than the device's KV: blocks staged at a time;
- `spilled`: requests are preempted, and their KV comes back from the host: tokens fetched;
- `borrowed`: another device's pages are lent meanwhile, and half of them recalled: pages used;
- `borrower_killed`, `lender_killed`: the worker, meanwhile (SIGKILL), and second turns of requests
  from before: tokens fetched after it; pages used before it;
- `restarted`: second turns, after another server has begun with the same disk: tokens fetched.

`ok`: all examples hold, all cases happened, and no request has another token.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.servers import serving_fleets
from ballast.cluster.controller import Controller
from ballast.core.event import FailedOutput, FinishedOutput, TokenOutput
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.report import DeviceReport
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings
from ballast.core.units import GiB, KiB, MiB
from ballast.kv.stream_caches import layer_block_bytes, layer_blocks, remote_blocks, stream_caches
from ballast.policy.fleet.elastic_cache import (
    ElasticUnits,
    block_elements,
    elastic_units,
    scale_down,
    scale_up,
)
from benchmarks.common import finish, options
from benchmarks.tiny import VOCAB, tiny

LENDER, BORROWER = "cpu:0", "cpu:1"
PAGE = 64 * KiB
LENT = 24
OWN = 10
"""Pages of the borrower's own KV."""
NEW = 40
LONG = 600
"""Tokens of the prompt that does not fit the device's KV."""
Tokens = dict[str, tuple[int, ...]]


# -- worked examples ------------------------------------------------------------------------------


def worked() -> dict[str, bool]:
    """Each statement, and whether it holds."""
    lwm, small, middle, large = (
        block_elements(layers, 16, heads, 128)
        for layers, heads in ((32, 32), (36, 8), (40, 8), (64, 8))
    )
    layer = layer_block_bytes(16, 32, 128, 2)
    caches = stream_caches(layer_blocks(100 * layer, layer), [9, 8], 10)
    one = ElasticUnits(1, 1)
    return {
        "3.2: K_master 100, L 10, lenders of 9 and 8: 17 + 8 blocks": caches == (17, 8),
        "3.2: the longest context is 25 blocks, 10 without": caches.longest == 25
        and stream_caches(100, [], 10).longest == 10,
        "(2): 9 blocks and a half of 10 layers are 9": remote_blocks(95 * layer, layer, 10) == 9,
        "table 2: 0.5 MiB a token, LWM-7B": layer * 32 == 16 * 512 * KiB,
        "table 2: 0.141, 0.156 and 0.25 MiB, Qwen3": [
            round(2 * 2 * elements / 16 / MiB, 3) for elements in (small, middle, large)
        ]
        == [0.141, 0.156, 0.25],
        "(6)-(9): LWM to 14B 5:16": elastic_units(lwm, middle) == ElasticUnits(5, 16),
        "(6)-(9): LWM to 32B 1:2": elastic_units(lwm, large) == ElasticUnits(1, 2),
        "(6)-(9): LWM to 8B 9:32": elastic_units(lwm, small) == ElasticUnits(9, 32),
        "(6)-(9): 32B to 14B 5:8": elastic_units(large, middle) == ElasticUnits(5, 8),
        "Algorithm 1: taking back rounds up": scale_up(10, 16, ElasticUnits(5, 16), 16 * 27)
        == (32, 10),
        "Algorithm 1: lending rounds down": scale_down(40, 16, ElasticUnits(5, 16), [16 * 7])
        == (32, 10),
        "Algorithm 1 compares with all blocks, used or not": scale_up(10, 16, one, 160) == (0, 0),
    }


# -- tokens ---------------------------------------------------------------------------------------


def crowd(case: str, n: int = 8) -> list[Submission]:
    """`n` requests of one case, each second one sampled."""
    return [request(f"{case}{i}", _prompt(f"{case}{i}", 60 + 24 * i), i) for i in range(n)]


def request(id: str, prompt: tuple[int, ...], number: int) -> Submission:
    sampling = Sampling(temperature=0.8 * (number % 2), seed=number)
    return Submission(
        id=id, model="m", prompt=prompt, max_tokens=NEW, sampling=sampling, ignore_eos=True
    )


def second_turns(requests: Sequence[Submission], answers: Tokens) -> list[Submission]:
    return [
        request(f"{r.id}-2", (*r.prompt, *answers[r.id], *_prompt(r.id, 9)), i)
        for i, r in enumerate(requests)
    ]


def _prompt(id: str, n: int) -> tuple[int, ...]:
    seed = sum(ord(c) * 31**i for i, c in enumerate(id))
    return tuple((seed + k * (k + seed % 7)) % (VOCAB - 9) for k in range(n))


@dataclass(slots=True)
class Case:
    """What came of a case."""

    requests: int
    wrong: int
    happened: float

    @classmethod
    def of(cls, found: Tokens, expected: Tokens, happened: float) -> Case:
        wrong = sum(tokens != expected[id] for id, tokens in found.items())
        return cls(len(found), wrong, happened)


def in_process(settings: FleetSettings, requests: Sequence[Submission]) -> tuple[Tokens, int]:
    """Serve requests at once; returns tokens, and the most blocks that were staged at a time."""
    most = 0
    with InProcess(settings) as server:
        staged = server.device.state.models["m"].kv.staged

        def hear(now: float, output: object) -> None:
            nonlocal most
            most = max(most, len(staged))

        server.listen = hear
        answers = server.generate(requests)
        server.drain()
        server.device.state.validate()
    return {id: tuple(answer.tokens) for id, answer in answers.items()}, most


class Served:
    """A server of two devices, of which one has the model."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.devices = controller.devices

    def report(self, device: str = BORROWER) -> DeviceReport:
        found = self.devices[device].report
        assert found is not None
        return found

    @property
    def fetched(self) -> int:
        return sum(self.report().fetched_tokens.values())

    async def answer(
        self,
        requests: Sequence[Submission],
        amid: Callable[[], Awaitable[object]] | None = None,
    ) -> tuple[Tokens, int]:
        """Answer requests at once, with `amid` while they decode; returns tokens, and the most
        borrowed pages that their KV took."""
        stream = self.controller.router.submit(requests)
        tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        ended: set[str] = set()
        borrowed, task = 0, None
        while stream.more:
            for output in await stream.take():
                if isinstance(output, TokenOutput):
                    tokens[output.request_id].append(output.token)
                elif isinstance(output, FinishedOutput | FailedOutput):
                    ended.add(output.request_id)
                    assert isinstance(output, FinishedOutput), output
            borrowed = max(borrowed, *(m.borrowed_pages for m in self.report().models), 0)
            if amid is not None and task is None and sum(map(len, tokens.values())) > 4 * NEW:
                task = asyncio.ensure_future(amid())
        if task is not None:
            await task
        assert ended == tokens.keys()
        return {id: tuple(found) for id, found in tokens.items()}, borrowed

    async def lend(self) -> None:
        while (await self.controller.commands.lend(LENDER, BORROWER, LENT * PAGE)).code is not None:
            await asyncio.sleep(0.05)  # they do not know each other yet
        await until(lambda: sum(self.report().borrowed.values()) == LENT)

    async def recall_half(self) -> None:
        done = await self.controller.commands.recall(LENDER, BORROWER, LENT // 2 * PAGE, 60.0)
        assert done.code is None, done

    async def kill(self, device: str) -> None:
        restarts = self.devices.restarts
        self.devices[device].kill("a benchmark")
        await until(lambda: self.devices.restarts > restarts and not self.devices.missing)


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.02)


async def served(fleet: FleetSettings, expected: Tokens) -> dict[str, Case]:
    """All cases of servers."""
    found: dict[str, Case] = {}
    first = crowd("spilled")
    async with serving_fleets([fleet]) as (controller,):
        server = Served(controller)
        tokens, _ = await server.answer(first)
        await asyncio.sleep(2 * REPORTED)
        found["spilled"] = Case.of(tokens, expected, server.fetched)
        await server.lend()
        tokens, used = await server.answer(crowd("borrowed"), server.recall_half)
        found["borrowed"] = Case.of(tokens, expected, used)
        tokens, _ = await server.answer(crowd("borrower_killed"), lambda: server.kill(BORROWER))
        tokens |= (await server.answer(second_turns(first, expected)))[0]
        await asyncio.sleep(2 * REPORTED)
        found["borrower_killed"] = Case.of(tokens, expected, server.fetched)
        await server.lend()
        tokens, used = await server.answer(crowd("lender_killed"), lambda: server.kill(LENDER))
        found["lender_killed"] = Case.of(tokens, expected, used)
    async with serving_fleets([fleet]) as (controller,):
        server = Served(controller)
        tokens, _ = await server.answer(second_turns(first, expected))
        await asyncio.sleep(2 * REPORTED)
        found["restarted"] = Case.of(
            tokens, expected, server.report().fetched_tokens.get("disk", 0)
        )
    return found


REPORTED = 0.5
"""Seconds after which a worker's report is not older than its last answer."""


# -- both -----------------------------------------------------------------------------------------


def make_model(directory: Path) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(7)
    config = tiny("llama", num_hidden_layers=8, max_position_embeddings=1024)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def measure(directory: Path) -> dict[str, Case]:
    path = make_model(directory / "m")
    device = DeviceSettings(
        name=LENDER,
        budget_bytes=64 * MiB,
        page_bytes=PAGE,
        step_tokens=64,
        step_logits=8,
        threads=1,
    )
    model = ModelSettings(name="m", path=str(path), dtype="float32")
    roomy = FleetSettings(models=(model,), device=device)
    long = request("streamed", _prompt("streamed", LONG), 0)
    streamed = [long, *crowd("streamed-beside", 2)]
    first = crowd("spilled")
    others = [r for case in ("borrowed", "borrower_killed", "lender_killed") for r in crowd(case)]
    expected, _ = in_process(roomy, [*streamed, *first, *others])
    again, _ = in_process(roomy, second_turns(first, expected))
    expected |= again
    with InProcess(roomy) as server:
        state = server.device.state
        pages = state.arena.pages + state.models["m"].weights.pages + OWN
        assert state.models["m"].kv.layout.pages(LONG // state.models["m"].spec.block_tokens) > OWN
    short = replace(device, budget_bytes=pages * PAGE)
    swift = FleetSettings(models=(model,), device=short, preset="swiftcache")
    tokens, most = in_process(swift, streamed)
    found = {"streamed": Case.of(tokens, expected, most)}
    fleet = FleetSettings(
        models=(replace(model, devices=(BORROWER,)),),
        device=device,
        others=(replace(short, name=BORROWER),),
        other_links=(LinkSettings(device=BORROWER),),
        kv=KvTierSettings(host_bytes=32 * MiB, disk_path=str(directory / "kv"), disk_bytes=GiB),
    )
    return found | asyncio.run(served(fleet, expected))


def show(statements: dict[str, bool], cases: dict[str, Case]) -> Table:
    table = Table("case", "requests", "wrong", "happened")
    for name, case in cases.items():
        table.add_row(name, str(case.requests), str(case.wrong), f"{case.happened:.0f}")
    held = sum(statements.values())
    table.add_row("worked examples", str(len(statements)), str(len(statements) - held), "")
    return table


def main() -> None:
    args = options(__doc__)
    statements = worked()
    with tempfile.TemporaryDirectory() as scratch:
        cases = measure(Path(scratch))
    ok = all(statements.values()) and not any(c.wrong or not c.happened for c in cases.values())
    result = {
        "ok": ok,
        "worked": statements,
        "exact": {
            name: {"requests": c.requests, "wrong": c.wrong, "happened": c.happened}
            for name, c in cases.items()
        },
    }
    finish(args, "swift_exact", result, show(statements, cases))


if __name__ == "__main__":
    main()
