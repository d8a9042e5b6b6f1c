"""Operators' orders on a live device: what serves goes on, and the books agree afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import ActivateCommand, Change, EvictCommand, Leave, ReleaseMemory
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.event import FailedOutput
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import KiB, MiB, format_bytes
from ballast.core.view import Residency
from ballast.engine.commands import REMOVED
from ballast.memory import syscalls
from tests.engine.checkpoints import VOCAB, make_base_and_tuned, make_llama
from tests.engine.holding import held, until

DEADLINE = 240.0


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models unlike each other, one with the first's embeddings and head, and a wide one."""
    root = tmp_path_factory.mktemp("models")
    base, tuned = make_base_and_tuned(root)
    other = make_llama(root / "other", 2, num_hidden_layers=3)
    wide = make_llama(root / "wide", 3, intermediate_size=4096)
    return {"base": base, "tuned": tuned, "other": other, "wide": wide}


def settings(paths: dict[str, Path], name: str, of: str | None = None) -> ModelSettings:
    return ModelSettings(name=name, path=str(paths[of or name]), dtype="float32")


def fleet(paths: dict[str, Path], *names: str, preset: str = "balloon") -> FleetSettings:
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, step_logits=8, threads=1
    )
    models = tuple(settings(paths, n) for n in names)
    return FleetSettings(models=models, device=device, preset=preset)


def asked(model: str, tokens: int = 30, id: str | None = None) -> Submission:
    prompt = tuple((11 * k + 5) % VOCAB for k in range(20))
    return Submission(
        id=id or model,
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        sampling=Sampling(temperature=0.0, seed=1),
        ignore_eos=True,
    )


def ordered(server: InProcess, order: DeviceCommand) -> CommandOutcome:
    """Order and wait for the end."""
    return ordering(server, order)()


def ordering(server: InProcess, order: DeviceCommand) -> Callable[[], CommandOutcome]:
    """Order; what is returned waits for the end."""
    ended = threading.Event()
    outcomes: list[CommandOutcome] = []

    def done(outcome: CommandOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    def outcome() -> CommandOutcome:
        assert ended.wait(DEADLINE)
        (result,) = outcomes
        return result

    server.device.command(order, done)
    return outcome


def validate(server: InProcess) -> None:
    """Ledger, ranges, operating system and report agree."""
    state = server.device.state
    result = server.device.snapshot().owners
    assert {o: n for o, n in result.items() if n} == state.pool.ledger.owners()
    state.pool.validate()
    state.arena.validate()
    for m in state.models.values():
        m.weights.validate()
        m.kv.validate([])
        assert m.kv.book.backing.os_backed() == state.pool.ledger.owned(m.kv.owner)
        mapped = state.pool.ledger.owned(m.weights.owner) + state.pool.ledger.holders.held(
            m.weights.owner
        )
        assert m.weights.range.os_backed() == mapped


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> Callable[[str], list[int]]:
    """The first 200 tokens of a model that serves by itself."""
    known: dict[str, list[int]] = {}

    def of(name: str) -> list[int]:
        if name not in known:
            with InProcess(fleet(paths, name)) as server:
                known[name] = server.generate([asked(name, 200)])[name].tokens
        return known[name]

    return of


@pytest.mark.parametrize(
    ("preset", "lanes"), [("balloon", 1), ("swap", 1), ("static", 1), ("balloon", 2)]
)
def test_a_model_comes_and_goes_while_another_answers(
    paths: dict[str, Path], alone: Callable[[str], list[int]], preset: str, lanes: int
) -> None:
    served = fleet(paths, "base", preset=preset)
    served = replace(served, device=replace(served.device, lanes=lanes, threads=lanes))
    with InProcess(served) as server:
        device = server.device
        host_bytes, named = device.tier.n_bytes, set(device.specs)
        server.submit(asked("base", 200))
        outcome = ordered(server, Add(settings(paths, "other")))
        assert (outcome.code, list(outcome.specs)) == (None, ["base", "other"])
        assert server.generate([asked("other", 60)])["other"].tokens == alone("other")[:60]
        validate(server)
        assert ordered(server, Remove("other", 10.0)).code is None
        server.wait()
        assert server.answers["base"].tokens == alone("base")
        end = server.generate([asked("other", 5, id="late")])["late"].end
        assert isinstance(end, FailedOutput)
        assert end.code == "model_not_found"
        assert (device.tier.n_bytes, set(device.specs)) == (host_bytes, named)
        assert set(device.executors) == named
        assert "weights:other" not in device.snapshot().owners
        validate(server)


def test_an_added_model_shares_what_a_resident_one_has(
    paths: dict[str, Path], alone: Callable[[str], list[int]]
) -> None:
    """What was the first one's own becomes both's, in the middle of its answer."""
    with InProcess(fleet(paths, "base")) as server:
        with held(server, 5, "base") as until_held:
            server.submit(asked("base", 200))
            until_held()
            host_bytes = server.device.tier.n_bytes
            assert ordered(server, Add(settings(paths, "tuned"))).code is None
            state = server.device.state
            shared = [x.shared is not None for x in state.models["base"].weights.segments]
            assert shared == [True, False, False, True]
        server.generate([asked("tuned", 20)])
        server.wait()
        sizes = state.models["tuned"].spec.segment_bytes
        moved = [e for e in server.device.story.entries if e.get("event") == "TransferDone"]
        assert [e["n_bytes"] for e in moved][1:] == [sum(sizes[1:3])]
        assert server.device.tier.n_bytes - host_bytes < sum(sizes)
        assert server.answers["base"].tokens == alone("base")
        validate(server)
        again = Add(settings(paths, "again", of="base"))
        assert ordered(server, again).code is None
        assert server.generate([asked("again", 60)])["again"].tokens == alone("base")[:60]
        assert "weights:base" not in state.pool.ledger.owners()
        for name in ("base", "tuned", "again"):
            validate(server)
            assert ordered(server, Remove(name, 10.0)).code is None
        assert state.pool.ledger.owners() == {"arena:lanes": state.arena.pages}
        assert state.shared == ()
        assert server.device.tier.n_bytes == 0


ARENA = 64 * MiB


def _mappings_of_models() -> int:
    """Mappings of memory files and of reserved addresses: not stacks of threads, nor the rest of
    what the C library's allocator has reserved for a thread, up to a multiple of `ARENA`."""
    gc.collect()  # what tests before have left
    found = 0
    for line in syscalls.maps().splitlines():
        addresses, rights, *_ = line.split()
        low, high = (int(end, 16) for end in addresses.split(b"-"))
        reserved = rights == b"---p" and high - low > 64 * KiB
        found += b"memfd:ballast" in line or (reserved and (high % ARENA > 0 or high - low > ARENA))
    return found


def test_a_wider_model_gets_a_larger_arena_or_is_refused(
    paths: dict[str, Path], alone: Callable[[str], list[int]]
) -> None:
    tight = fleet(paths, "base")
    with InProcess(tight) as server:
        arena = server.device.state.arena.pages
        assert ordered(server, Add(settings(paths, "wide"))).code is None
        wider = server.device.state.arena.pages
        assert wider > arena
        assert server.generate([asked("wide", 20)])["wide"].tokens == alone("wide")[:20]
        assert server.device.cap.n_bytes == wider * 64 * KiB
        weights = server.device.state.models["wide"].weights.pages
        validate(server)
    small = replace(tight.device, budget_bytes=(wider + weights) * 64 * KiB)
    with InProcess(replace(tight, device=small)) as server:
        host_bytes, mappings = server.device.tier.n_bytes, _mappings_of_models()
        outcome = ordered(server, Add(settings(paths, "wide")))
        assert outcome.code == "refused"
        assert "wide needs a device of at least" in outcome.reason
        assert f"{format_bytes(wider * 64 * KiB)} for activations with wide" in outcome.reason
        assert server.device.tier.n_bytes == host_bytes
        assert _mappings_of_models() == mappings
        assert server.device.state.arena.pages == arena
        assert server.generate([asked("base", 60)])["base"].tokens == alone("base")[:60]
        validate(server)


def test_a_device_too_small_for_its_activations_says_what_it_needs(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths, "base")) as server:
        arena = server.device.state.arena.pages * 64 * KiB
    wider = {
        **paths,
        "wider": make_llama(paths["wide"].parent / "wider", 3, intermediate_size=1 << 15),
    }
    small = replace(fleet(paths, "base").device, budget_bytes=arena + 1 * MiB)
    with InProcess(replace(fleet(paths, "base"), device=small)) as server:
        outcome = ordered(server, Add(settings(wider, "wider")))
        assert outcome.code == "refused"
        assert "wider needs a device of at least" in outcome.reason
        validate(server)


def test_what_cannot_be_added_says_why(paths: dict[str, Path], tmp_path: Path) -> None:
    broken = make_llama(tmp_path / "broken", 5)
    (file,) = broken.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    with InProcess(fleet(paths, "base")) as server:
        twice = ordered(server, Add(settings(paths, "base")))
        assert (twice.code, twice.reason) == ("refused", "there is a model 'base' already")
        outcome = ordered(server, Add(ModelSettings(name="broken", path=str(broken))))
        assert outcome.code == "invalid"
        assert str(file) in outcome.reason
        unknown = ordered(server, Remove("nobody", 1.0))
        assert (unknown.code, unknown.reason) == ("refused", "no model 'nobody' on this device")
        assert list(server.device.specs) == ["base"]
        validate(server)


def test_removal_ends_what_is_open_after_its_patience(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths, "base", "other")) as server:
        pending = server.device.loop.commands.pending
        with held(server, 1, "base") as until_held:
            server.submit(asked("base", 230))
            until_held()
            outcome = ordering(server, Remove("base", 0.0))
            until(lambda: any(isinstance(o, Leave) and o.at_once for o in [*pending.values()]))
        assert outcome().code is None
        server.wait()
        end = server.answers["base"].end
        assert end == FailedOutput("base", "unavailable", REMOVED)
        server.generate([asked("other", 5)])
        validate(server)


def test_eviction_by_the_operator_changes_no_token(
    paths: dict[str, Path], alone: Callable[[str], list[int]]
) -> None:
    with InProcess(fleet(paths, "base")) as server:
        with held(server, 5, "base") as until_held:
            server.submit(asked("base", 200))
            until_held()
            outcome = ordering(server, EvictCommand("base", why="a test"))
        assert outcome().code is None
        server.wait()
        assert server.answers["base"].tokens == alone("base")
        assert server.device.snapshot().models[0].preemptions == 1
        assert ordered(server, EvictCommand("base")).code is None
        state = server.device.state
        assert state.models["base"].residency is Residency.ABSENT
        assert ordered(server, EvictCommand("base")).code is None
        assert ordered(server, ActivateCommand("base")).code is None
        assert state.models["base"].residency is Residency.RESIDENT
        story = server.device.decisions()[-3:]
        assert [(e["action"], e.get("by")) for e in story] == [
            ("Evict", "operator"),
            ("Evict", "operator"),
            ("Activate", "operator"),
        ]
        assert server.device.decisions() == ()
        validate(server)


def test_a_change_counts_at_once(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths, "base")) as server:
        change = Change(
            model="base",
            slo=Slo(ttft=0.5, tpot=0.05),
            priority=3,
            max_waiting=0,
            queue_seconds=None,
            pinned=True,
        )
        outcome = ordered(server, change)
        assert outcome.specs["base"].pinned
        assert outcome.specs["base"].slo == Slo(ttft=0.5, tpot=0.05)
        end = server.generate([asked("base", 5)])["base"].end
        assert isinstance(end, FailedOutput)
        assert end.code == "queue_full"
        assert ordered(server, ActivateCommand("base")).code is None
        refused = ordered(server, EvictCommand("base"))
        assert (refused.code, refused.reason) == ("refused", "base is pinned")
        assert ordered(server, replace(change, max_waiting=9, pinned=False)).code is None
        assert ordered(server, EvictCommand("base")).code is None
        assert len(server.generate([asked("base", 5, id="now")])["now"].tokens) == 5


def test_orders_after_the_end_are_refused(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths, "base")) as server:
        pass
    for order in (EvictCommand("base"), Add(settings(paths, "other")), Remove("base", 0.0)):
        assert ordered(server, order).code == "unavailable"


def test_memory_goes_back_to_the_machine_and_is_taken_again(
    paths: dict[str, Path], alone: Callable[[str], list[int]]
) -> None:
    with InProcess(fleet(paths, "base")) as server:
        server.generate([asked("base", 5, id="first")])
        device, pool = server.device, server.device.state.pool
        device.populate()
        before = device.vm.physical_bytes()
        outcome = ordered(server, ReleaseMemory(256 * KiB, "by an operator"))
        assert (outcome.code, list(outcome.specs)) == (None, ["base"])
        assert outcome.released == before - device.vm.physical_bytes() > 0
        assert pool.free_pages.populated == 4
        (told,) = (d for d in device.decisions() if d["action"] == "ReleaseMemory")
        assert (told["kept_bytes"], told["by"]) == (256 * KiB, "operator")
        # Its weights come, and its KV grows, in pages without memory.
        assert ordered(server, EvictCommand("base")).code is None
        assert ordered(server, ReleaseMemory()).released > 0
        assert server.generate([asked("base", 200)])["base"].tokens == alone("base")
        validate(server)
        after = device.vm.physical_bytes()
    assert after < before
    assert ordered(server, ReleaseMemory()).code == "unavailable"
