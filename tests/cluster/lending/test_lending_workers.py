"""Two worker processes with a GPU's stand-in each lend over one controller; one is killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster.controller import Controller
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.core.capability import IMPORT
from ballast.core.event import TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
    ServerSettings,
)
from ballast.core.units import KiB, MiB
from ballast.engine.sizing import GPU_LANE_BYTES
from tests.cluster.lending import fake_gpu_worker
from tests.engine.checkpoints import VOCAB, make_llama
from tests.engine.gpus import serving
from tests.memory.fake_cuda import FakeDriver

WORKER = (sys.executable, str(Path(fake_gpu_worker.__file__)))
LENDER, BORROWER = "cuda:0", "cuda:1"
PAGE = 64 * KiB
DEADLINE = 240.0


def fleet_of(path: Path) -> FleetSettings:
    """The borrower has room for the model and six pages of its KV."""
    lender = DeviceSettings(
        name=LENDER,
        budget_bytes=64 * MiB + GPU_LANE_BYTES,
        page_bytes=PAGE,
        step_tokens=32,
        step_logits=8,
        graphs=0,
    )
    models = (ModelSettings(name="base", path=str(path), dtype="float32", devices=(BORROWER,)),)
    one = FleetSettings(models=(replace(models[0], devices=()),), device=lender)
    with serving(one, FakeDriver(n_bytes=1 << 30, devices=2)) as server:
        state = server.device.state
        pages = state.arena.pages + state.models["base"].weights.pages + 6
    borrower = replace(lender, name=BORROWER, budget_bytes=pages * PAGE)
    links = (LinkSettings(device=BORROWER),)
    lone = ServerSettings(spare_worker=False)
    return FleetSettings(
        models=models, device=lender, others=(borrower,), other_links=links, server=lone
    )


def asked() -> list[Submission]:
    prompts = [tuple((11 * k + 5 * i) % VOCAB for k in range(20 + 10 * i)) for i in range(8)]
    return [
        Submission(id=f"r{i}", model="base", prompt=prompt, max_tokens=100, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


async def answers(controller: Controller, after: Callable[[], None] = lambda: None) -> list[int]:
    """All tokens, by request; `after`: what to do once some have come."""
    stream = controller.router.submit(asked())
    tokens: dict[str, list[int]] = {}
    while stream.more:
        for output in await stream.take():
            if isinstance(output, TokenOutput):
                tokens.setdefault(output.request_id, []).append(output.token)
        if sum(map(len, tokens.values())) > 100:
            after()
    return [token for id in sorted(tokens) for token in tokens[id]]


@pytest.mark.slow
def test_lend_recall_and_kill(tmp_path: Path) -> None:
    fleet = fleet_of(make_llama(tmp_path / "base", 1))

    async def scenario() -> None:
        controller = Controller(LocalWorkers(lambda: LocalWorker(WORKER)))
        try:
            await controller.start(fleet)
            assert {c.means for c in controller.devices.lending} == {IMPORT}
            expected = await answers(controller)
            lender, borrower = (controller.devices[name] for name in (LENDER, BORROWER))

            def pages(lent: int, borrowed: int) -> bool:
                a, b = lender.report, borrower.report
                assert a is not None
                assert b is not None
                result = (a.owners.get(f"lent:{BORROWER}", 0), sum(b.borrowed.values()))
                return result == (lent, borrowed)

            while (await controller.commands.lend(LENDER, BORROWER, 70 * PAGE)).code is not None:
                await asyncio.sleep(0.01)  # they do not know each other yet
            await until(lambda: pages(70, 70))
            assert await answers(controller) == expected
            outcome = await controller.commands.recall(LENDER, BORROWER, 40 * PAGE, 60.0)
            assert outcome.code is None
            await until(lambda: pages(30, 30))
            killed: list[str] = []

            def kill() -> None:
                if not killed:
                    killed.append(BORROWER)
                    controller.devices[BORROWER].kill("a test")

            assert await answers(controller, kill) == expected
            await until(lambda: controller.devices.restarts == 1 and pages(0, 0))
        finally:
            await controller.close(10.0)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
