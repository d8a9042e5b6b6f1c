"""A server that dies, and the next one, which finds the workers of its fleet on their hosts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster.controller import Controller
from ballast.cluster.hosts import hosted_workers
from ballast.cluster.hosts.hosted_worker import HostedWorker
from ballast.cluster.hosts.hosted_workers import HostedWorkers, fleet_id
from ballast.cluster.worker.early_process import COMMAND
from ballast.core.errors import Unavailable
from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, ServerSettings
from tests.cluster.fake_device import HOLD
from tests.cluster.hosts.agents import Agents
from tests.cluster.hosts.test_hosted_workers import patience  # noqa: F401 - a fixture
from tests.cluster.test_devices import FLEET, asked, until
from tests.cluster.worker.test_worker import DEADLINE, FAKE, all_of, tokens
from tests.models.tiny import llama

THREADS = replace(
    FLEET,
    device=replace(FLEET.device, threads=1),
    others=tuple(replace(device, threads=1) for device in FLEET.others),
)


@pytest.fixture(autouse=True)
def confined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of real models are, which open no network sockets."""
    monkeypatch.setenv("BALLAST_TEST_DEVICE_CONFINED", "1")


async def begun(agents: Agents, fleet: FleetSettings = THREADS, command=FAKE, *, local=False):  # type: ignore[no-untyped-def]
    """A server that serves."""
    workers = HostedWorkers(agents, fleet, command, local=local)
    await workers.start()
    controller = Controller(workers, workers)
    await controller.start(fleet)
    await controller.kept_homes(fleet)
    return controller, workers


def die(controller: Controller, workers: HostedWorkers) -> None:
    """Have a server end without a word, as one that is killed does: its connections are closed."""
    for device in controller.devices.values():
        assert device._supervisor is not None
        device._supervisor.cancel()
        assert isinstance(device.worker, HostedWorker)
        device.worker._watch.stop()
        device.worker._socket.close()
    for link in workers._links.values():
        link._reading.cancel()
        link.gone = "the server is dead"
        link._socket.close()


@asynccontextmanager
async def serving(
    agents: Agents,
    fleet: FleetSettings = THREADS,
    command: tuple[str, ...] = FAKE,
    *,
    local: bool = False,
) -> AsyncIterator[tuple[Controller, HostedWorkers]]:
    controller, workers = await begun(agents, fleet, command, local=local)
    try:
        yield controller, workers
    finally:
        await controller.close(5.0)


def pids(controller: Controller) -> dict[str, int]:
    found = {}
    for name, device in controller.devices.items():
        assert isinstance(device.worker, HostedWorker)
        assert device.worker.hello is not None
        found[name] = device.worker.hello.pid
    return found


@pytest.mark.parametrize("local", [False, True], ids=["over TCP", "by Unix sockets"])
def test_the_next_server_finds_the_workers(local: bool) -> None:
    async def scenario() -> None:
        agents = Agents("x", "y")
        async with asyncio.timeout(DEADLINE):
            first, workers = await begun(agents, local=local)
            before = pids(first)
            held = first.router.submit([asked("held", "a", HOLD)])
            assert tokens(await held.take()) == [10, 11]
            die(first, workers)
            async with serving(agents, local=local) as (second, _):
                assert pids(second) == before
                # What was open has ended: an id of it is free, and its pages are.
                report = second.devices["cpu:0"].report
                assert report is not None
                assert list(second.devices.specs) == ["a", "b", "ab"]
                await until(lambda: no_kv(second))
                for model in ("a", "b", "ab"):
                    plain = await all_of(second.router.submit([asked("held", model)]))
                    assert tokens(plain) == [10, 11, 12, 10, 11, 12]
                    assert isinstance(plain[-1], FinishedOutput)
                assert second.devices.restarts == 0
        assert all(agent.returncode is not None for agent in agents.agents.values())

    asyncio.run(scenario())


def no_kv(controller: Controller) -> bool:
    reports = [device.report for device in controller.devices.values()]
    return all(r is not None and not any(m.kv_pages for m in r.models) for r in reports)


def test_what_has_changed_is_started_anew_and_the_rest_is_kept() -> None:
    first, second = THREADS.models[:2]
    bigger = replace(THREADS.others[0], budget_bytes=2**21)
    more = ModelSettings(name="new", path="new", devices=("cpu:0",))
    changed = replace(THREADS, models=(first, second, more), others=(bigger,))

    async def scenario() -> None:
        agents = Agents("x", "y")
        async with asyncio.timeout(DEADLINE):
            old, workers = await begun(agents)
            before = pids(old)
            die(old, workers)
            async with serving(agents, changed) as (new, _):
                now = pids(new)
                assert now["cpu:0"] == before["cpu:0"]
                assert now["cpu:1"] != before["cpu:1"], "it has another budget"
                served = {name: set(device.specs) for name, device in new.devices.items()}
                assert served == {"cpu:0": {"a", "new"}, "cpu:1": {"b"}}
                for model in ("a", "b", "new"):
                    await all_of(new.router.submit([asked(model, model)]))

    asyncio.run(scenario())


def test_a_host_whose_server_lives_takes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        agents = Agents("x")
        async with serving(agents) as (controller, _):
            monkeypatch.setattr(hosted_workers, "MEET_SECONDS", 0.2)
            other = HostedWorkers(agents, THREADS, FAKE, local=False)
            with pytest.raises(Unavailable, match="did not connect"):
                await other.start()
            await all_of(controller.router.submit([asked("1", "a")]))

    asyncio.run(scenario())


def test_a_device_is_kept_for_some_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_workers, "KEEP_SECONDS", 0.05)

    async def scenario() -> None:
        agents = Agents("x")
        async with asyncio.timeout(DEADLINE):
            first, workers = await begun(agents)
            before = pids(first)
            die(first, workers)
            assert await agents.agents["x"].wait() == 3, "abandoned"
            async with serving(agents) as (second, _):
                assert pids(second).items().isdisjoint(before.items())
                await all_of(second.router.submit([asked("1", "a")]))

    asyncio.run(scenario())


@pytest.mark.slow
def test_weights_and_kv_are_those_of_before(tmp_path: Path) -> None:
    """A model that is really computed: the next server's client finds its conversation cached."""
    llama(tmp_path / "m")
    fleet = FleetSettings(
        models=(ModelSettings(name="m", path=str(tmp_path / "m")),),
        device=DeviceSettings(name="cpu:0", budget_bytes=64 << 20, threads=1),
        server=ServerSettings(spare_worker=False),
    )

    def turn(id: str, prompt: tuple[int, ...]) -> Submission:
        return Submission(id=id, model="m", prompt=prompt, max_tokens=8)

    async def scenario() -> None:
        agents = Agents("x")
        async with asyncio.timeout(DEADLINE):
            first, workers = await begun(agents, fleet, COMMAND)
            prompt = tuple(range(2, 66))
            said = tokens(await all_of(first.router.submit([turn("1", prompt)])))
            before = pids(first)
            die(first, workers)
            async with serving(agents, fleet, COMMAND) as (second, _):
                assert pids(second) == before
                outputs = await all_of(second.router.submit([turn("2", (*prompt, *said, 5))]))
                assert cached(outputs) > len(prompt) // 2, "in whole blocks"
                report = second.devices.report
                assert report is not None
                assert [m.activations for m in report.models] == [1], "weights came once"

    asyncio.run(scenario())


def cached(outputs: list[Output]) -> int:
    return next(o.cached_tokens for o in outputs if isinstance(o, TokenOutput))


def test_a_fleet_is_known_by_its_name_or_its_files_path(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    assert fleet_id(one) == fleet_id(tmp_path / "." / "one.yaml") != fleet_id(other)
    assert fleet_id(one, "chat") == fleet_id(other, "chat") == "chat"
