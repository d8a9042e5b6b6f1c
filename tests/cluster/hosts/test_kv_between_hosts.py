"""Streams that move with their KV to a device of another host: no token changes, no page stays.

Hosts are agents' processes, whose workers run a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ballast.cluster.controller import Controller
from ballast.cluster.worker.local_process import COMMAND
from ballast.core.event import FailedOutput
from ballast.core.link import LinkSettings
from ballast.core.order import MoveRequests
from ballast.core.request import Sampling, Submission
from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    HostsSettings,
    ModelSettings,
    ServerSettings,
)
from tests.cluster.hosts.agents import Agents
from tests.cluster.hosts.test_hosted_workers import patience  # noqa: F401 - a fixture
from tests.cluster.hosts.test_kept_workers import serving
from tests.cluster.test_devices import until
from tests.cluster.worker.test_worker import DEADLINE, all_of, tokens
from tests.models.tiny import llama

STREAMS, PROMPT, OUTPUT = 2, 41, 15_000
DEVICES = ("cpu:0", "cpu:1")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> FleetSettings:
    path = tmp_path_factory.mktemp("m")
    llama(path, max_position_embeddings=16_384)
    first, second = (
        DeviceSettings(
            name=name,
            budget_bytes=64 << 20,
            page_bytes=64 << 10,
            step_tokens=64,
            step_logits=8,
            threads=1,
        )
        for name in DEVICES
    )
    model = ModelSettings(
        name="m", path=str(path), dtype="float32", block_tokens=16, devices=DEVICES
    )
    return FleetSettings(
        models=(model,),
        device=first,
        others=(second,),
        other_links=(LinkSettings(),),
        server=ServerSettings(spare_worker=False),
        hosts=HostsSettings(ray="of the test"),
    )


def asked(i: int) -> Submission:
    prompt = tuple((11 * k + 5 * i + 1) % 64 for k in range(PROMPT))
    sampling = Sampling(temperature=i % 2, seed=i)
    return Submission(
        id=f"{i}",
        model="m",
        prompt=prompt,
        max_tokens=OUTPUT,
        sampling=sampling,
        ignore_eos=True,
    )


class Streams:
    """Streams of a device, whose clients take what comes."""

    def __init__(self, controller: Controller, source: str, target: str) -> None:
        self._controller, self._source, self._target = controller, source, target
        self.tokens: list[list[int]] = [[] for _ in range(STREAMS)]
        self._more = asyncio.Event()
        self._clients: list[asyncio.Future[None]] = []

    async def _follow(self, i: int) -> None:
        stream = self._controller.router.submit([asked(i)])
        try:
            while stream.more:
                outputs = await stream.take()
                self.tokens[i] += tokens(outputs)
                self._more.set()
                for output in outputs:
                    assert not isinstance(output, FailedOutput), output
        finally:
            stream.close()

    async def _grow(self) -> None:
        """Wait until each has 24 tokens more."""
        before = [len(each) for each in self.tokens]
        while any(len(now) < n + 24 for now, n in zip(self.tokens, before, strict=True)):
            self._more.clear()
            await self._more.wait()
            for client in self._clients:
                assert not client.done(), client.exception()

    async def moved(self, amid: Callable[[], object] = lambda: None) -> int:
        """Run them on `source`, then have them move to `target`; `amid`: called as that begins.
        Returns how many have left. They are compared with undisturbed ones, and end."""
        devices = self._controller.devices
        devices[self._target].cordoned = True
        self._clients = [asyncio.ensure_future(self._follow(i)) for i in range(STREAMS)]
        for client in self._clients:
            client.add_done_callback(lambda _: self._more.set())
        await self._grow()
        devices[self._target].cordoned = False
        amid()
        left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        step = MoveRequests(self._source, "m", bring=True, target=self._target)
        self._controller.migrations.move_requests(step, left.set_result)
        n = await left
        await self._grow()
        for client in self._clients:
            client.cancel()
        await asyncio.wait(self._clients)
        await until(lambda: devices.open_requests == 0)
        for i, seen in enumerate(self.tokens):
            plain = self._controller.router.submit([replace(asked(i), max_tokens=len(seen))])
            assert tokens(await all_of(plain)) == seen
        return n


def moved_in(controller: Controller) -> list[int]:
    return [device.moved_in for device in controller.devices.values()]


def none_used(controller: Controller) -> bool:
    """Whether all KV on the devices is that of cached prefixes."""
    reports = [device.report for device in controller.devices.values()]
    return all(
        report is not None and all(m.kv_pages == m.cached_pages for m in report.models)
        for report in reports
    )


@pytest.mark.slow
def test_streams_move_with_their_kv_or_stay(
    fleet: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        agents = Agents("x", "y")
        async with (
            asyncio.timeout(DEADLINE),
            serving(agents, fleet, COMMAND) as (controller, workers),
        ):
            assert [workers.host_of(device) for device in DEVICES] == ["host-x", "host-y"]
            assert await Streams(controller, *DEVICES).moved() == STREAMS
            assert moved_in(controller) == [0, STREAMS]
            assert await Streams(controller, *DEVICES[::-1]).moved() == STREAMS
            assert moved_in(controller) == [STREAMS, STREAMS]

            with monkeypatch.context() as amid:  # what comes was not offered
                amid.setattr(workers, "offer_kv", lambda *_: "x/of nothing")
                assert await Streams(controller, *DEVICES).moved() == 0
            with monkeypatch.context() as amid:  # it would take too long
                slow = replace(fleet, hosts=HostsSettings(network=1.0))
                amid.setattr(workers, "_fleet", slow)
                assert await Streams(controller, *DEVICES).moved() == 0
            assert moved_in(controller) == [STREAMS, STREAMS]
            await until(lambda: none_used(controller))
            assert controller.devices.restarts == 0

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["x", "y"], ids=["source", "target"])
def test_a_host_that_dies_as_kv_is_read_loses_nothing(fleet: FleetSettings, dies: str) -> None:
    async def scenario() -> None:
        agents = Agents("x", "y", "z")
        async with (
            asyncio.timeout(DEADLINE),
            serving(agents, fleet, COMMAND) as (controller, workers),
        ):
            offer = workers.offer_kv

            def offer_and_die(*asked: Any) -> str | None:
                source = offer(*asked)
                if dies not in agents._gone:
                    agents.lose(dies)
                return source

            with pytest.MonkeyPatch.context() as amid:
                amid.setattr(workers, "offer_kv", offer_and_die)
                await Streams(controller, *DEVICES).moved()
            await until(lambda: controller.devices.restarts == 1)
            assert "host-z" in {workers.host_of(device) for device in DEVICES}
            await until(lambda: none_used(controller))
            # The hosts that are left exchange KV.
            assert await Streams(controller, *DEVICES).moved() == STREAMS
            assert moved_in(controller) == [0, STREAMS]

    asyncio.run(scenario())
