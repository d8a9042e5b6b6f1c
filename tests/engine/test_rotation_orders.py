"""Layers rotate while operators have models come and go: answers stay right, and memory whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import ActivateCommand, EvictCommand
from ballast.core.command import Add, Remove
from ballast.core.event import FailedOutput, Output, TokenOutput
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.view import Residency
from tests.engine.checkpoints import make_llama
from tests.engine.orders import remap
from tests.engine.test_adapters import NAMES as ADAPTED
from tests.engine.test_adapters import World
from tests.engine.test_adapters import asked as asked_of_adapters
from tests.engine.test_rotating import calm, disturb
from tests.live.test_command_executor import asked, fleet, ordered, settings, validate

NAMES = ("a", "b", "c")
TURNED = Rotation((1, 4), 1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=6) for i, n in enumerate(NAMES)}


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> Mapping[str, list[int]]:
    """The first 200 tokens of each model."""
    with InProcess(fleet(paths, *NAMES)) as server:
        answers = server.generate([asked(name, 200) for name in NAMES])
    return {name: answer.tokens for name, answer in answers.items()}


def at_tokens(server: InProcess, wanted: Mapping[tuple[str, int], tuple[str, Rotation]]) -> None:
    """Have models' layers remapped when a request gets such a token, on the loop's thread."""

    def act(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            order = wanted.get((output.request_id, output.index))
            if order is not None:
                assert remap(server.device.state, *order) is None

    server.listen = act


def test_reports_tell_who_owns_every_page(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths, *NAMES)) as server:
        at_tokens(server, {("a", 10): ("a", TURNED), ("b", 10): ("b", TURNED)})
        server.generate([asked(name, 40) for name in NAMES])
        report = server.device.snapshot()
    assert report.owners.keys() >= {"slots:a", "slots:b"}
    assert "slots:c" not in report.owners
    assert sum(report.owners.values()) == report.total - report.free - report.reclaiming


def test_orders_while_layers_of_all_models_rotate(
    paths: dict[str, Path], alone: Mapping[str, list[int]]
) -> None:
    with InProcess(fleet(paths, *NAMES)) as server:
        policy = disturb(server, 5)
        state = server.device.state
        server.generate([asked(name, 20) for name in NAMES])
        for i in range(2):
            for name in NAMES:
                server.submit(asked(name, 120, f"{name}-{i}"))
            assert ordered(server, EvictCommand("a")).code is None
            assert ordered(server, ActivateCommand("a")).code is None
            assert ordered(server, Remove("b", 0.0 if i else 60.0)).code is None
            assert "slots:b" not in state.pool.ledger.owners()
            server.wait()
            assert ordered(server, Add(settings(paths, "b"))).code is None
        loads = {m.name: m.loads for m in server.device.snapshot().models}
        calm(server, policy)
        validate(server)
        assert state.models["a"].evictions >= 2
    assert min(loads["a"], loads["c"]) > 0
    ours = {f"{name}-{i}": name for name in NAMES for i in range(2)}
    for id, name in ours.items():
        answer = server.answers[id]
        if isinstance(answer.end, FailedOutput):
            assert (name, answer.end.code) == ("b", "unavailable")
        else:
            assert answer.tokens == alone[name][: len(answer.tokens)], id
    assert len(server.answers["b-0"].tokens) == 120


def test_a_model_that_would_share_rotating_layers_joins_when_they_rest(
    paths: dict[str, Path], alone: Mapping[str, list[int]]
) -> None:
    again = Add(settings(paths, "again", of="a"))
    with InProcess(fleet(paths, "a")) as server:
        state = server.device.state
        at_tokens(server, {("a", 10): ("a", TURNED), ("second", 10): ("a", WHOLE)})
        server.generate([asked("a", 40)])
        assert state.models["a"].weights.slots.rotation == TURNED
        host_bytes = server.device.tier.n_bytes
        refused = ordered(server, again)
        assert (refused.code, refused.reason) == (
            "refused",
            "layers that it has in common with a rotate now; evict a first",
        )
        assert (server.device.tier.n_bytes, list(server.device.specs)) == (host_bytes, ["a"])
        assert server.generate([asked("a", 60, "second")])["second"].tokens == alone["a"][:60]
        assert ordered(server, again).code is None
        assert "weights:a" not in state.pool.ledger.owners()
        answers = server.generate([asked("a", 200, "third"), asked("again", 200)])
        assert answers["third"].tokens == answers["again"].tokens == alone["a"]
        validate(server)


def test_once_evicted_layers_that_rotated_can_be_shared(
    paths: dict[str, Path], alone: Mapping[str, list[int]]
) -> None:
    with InProcess(fleet(paths, "a")) as server:
        at_tokens(server, {("a", 10): ("a", TURNED)})
        server.generate([asked("a", 40)])
        assert ordered(server, EvictCommand("a")).code is None
        assert server.device.state.models["a"].residency is Residency.ABSENT
        assert "slots:a" not in server.device.state.pool.ledger.owners()
        assert ordered(server, Add(settings(paths, "again", of="a"))).code is None
        answers = server.generate([asked("again", 200), asked("a", 200, "second")])
        assert answers["again"].tokens == answers["second"].tokens == alone["a"]
        validate(server)


def test_layers_on_their_way_back_are_not_shared(
    paths: dict[str, Path], alone: Mapping[str, list[int]]
) -> None:
    """They have memory again, but no bytes, until a job has passed them."""
    seen: list[tuple[bool, bool]] = []
    with InProcess(fleet(paths, "a")) as server:
        weights = server.device.state.models["a"].weights
        at_tokens(server, {("a", 10): ("a", TURNED), ("a", 30): ("a", WHOLE)})
        act, of_layers = server.listen, weights.spec.segment_digests[2:3]

        def look(now: float, output: Output) -> None:
            assert act is not None
            act(now, output)
            seen.append((weights.slots.rotation == WHOLE, weights.may_be_loading))

        server.listen = look
        assert weights.may_rotate(of_layers)
        assert not weights.may_rotate(["0" * 64])
        assert server.generate([asked("a", 60)])["a"].tokens == alone["a"][:60]
    assert seen[0] == seen[-1] == (True, False)
    assert {stirred for whole, stirred in seen if not whole} == {True}


@pytest.mark.parametrize("end", ["drain", "stop"])
def test_the_device_ends_while_layers_are_on_their_way(
    paths: dict[str, Path], alone: Mapping[str, list[int]], end: str
) -> None:
    def serve(fail: Callable[[], None]) -> InProcess:
        with InProcess(fleet(paths, *NAMES)) as server:
            disturb(server, 7)
            for i in range(2):
                server.generate([asked(name, 20, f"{name}-{i}") for name in NAMES])
            for name in NAMES:
                server.submit(asked(name, 100))
            fail()
        return server

    if end == "drain":
        server = serve(lambda: None)
        assert all(server.answers[name].tokens == alone[name][:100] for name in NAMES)
        return

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(stop)


def test_adapters_of_a_model_whose_layers_rotate(tmp_path: Path) -> None:
    world = World(tmp_path)
    requests = [asked_of_adapters(name, i) for i in range(2, 5) for name in ADAPTED]
    with InProcess(world.tight()) as server:
        disturb(server, 3)
        answers = server.generate(requests)
        loads = {m.name: m.loads for m in server.device.snapshot().models}
    assert loads["base"] > 0
    for r in requests:
        world.check(r, answers[r.id])
    outputs = {tuple(answers[f"{name}4"].tokens) for name in ADAPTED}
    assert len(outputs) == len(ADAPTED), "the adapters change nothing"
