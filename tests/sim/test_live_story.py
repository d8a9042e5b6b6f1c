"""Live runs replay: on the CPU backend, under pressure, whatever clients and operators do."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.bench.story_report import report_story
from ballast.core.actions import ActivateCommand, Change, EvictCommand, ReleaseMemory, Short
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.event import Output, TokenOutput
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import KiB, MiB
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import VOCAB, make_base_and_tuned, make_llama
from tests.live.test_command_executor import ordered

SLO = Slo(ttft=0.2, tpot=0.1)
PAGE = 64 * KiB
COMMON = tuple(range(60))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that share segments, and one that is unlike them."""
    root = tmp_path_factory.mktemp("models")
    base, tuned = make_base_and_tuned(root)
    return {"base": base, "tuned": tuned, "other": make_llama(root / "other", 2)}


def model(paths: dict[str, Path], name: str) -> ModelSettings:
    return ModelSettings(name=name, path=str(paths[name]), dtype="float32", slo=SLO)


def fleet(paths: dict[str, Path], preset: str, story: Path, pages: int) -> FleetSettings:
    """`pages` beside the arena."""
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=PAGE, step_tokens=32, step_logits=8, threads=1
    )
    models = tuple(model(paths, name) for name in paths)
    settings = FleetSettings(models=models, device=device, preset=preset)
    with InProcess(settings) as server:
        pages += server.device.state.arena.pages
    device = replace(device, budget_bytes=pages * PAGE)
    return replace(settings, device=device, story_path=str(story))


def asked(paths: dict[str, Path]) -> list[Submission]:
    return [
        Submission(
            id=f"{name}{i}",
            model=name,
            prompt=COMMON[: 20 * (i % 4)]
            + tuple((7 * i + 3 * k) % VOCAB for k in range(5 + 9 * i)),
            max_tokens=0 if i == 6 else 30,
            sampling=Sampling(temperature=0.7, seed=i, logprobs=0),
            ignore_eos=i > 2,
            stop_token_ids=tuple(range(0, VOCAB, 29)) if i == 3 else (),
            salt="tenant" if i == 4 else "",
            prompt_logprobs=1 if i == 5 else None,
            priority=i % 2,
        )
        for i in range(7)
        for name in paths
    ]


def follow(server: InProcess, requests: list[Submission]) -> None:
    """Ask, cancel some of it, and go on with what was answered."""

    def leave(now: float, output: Output) -> None:
        if (
            isinstance(output, TokenOutput)
            and output.index == 7
            and output.request_id.endswith("1")
        ):
            server.cancel(output.request_id)

    server.listen = leave
    result = server.generate(requests)
    later = [
        replace(r, id=f"{r.id}-again", prompt=(*r.prompt, *result[r.id].tokens, 1, 2))
        for r in requests
    ]
    twins = [replace(r, id=f"{r.id}-twin") for r in requests[:4]]
    server.generate([*later, *twins])


@pytest.mark.parametrize(
    ("preset", "pages"),
    [
        ("static", 160),
        ("swap", 60),
        ("balloon", 24),
    ],
)
def test_a_live_run_replays_to_the_same_actions(
    paths: dict[str, Path], preset: str, pages: int, tmp_path: Path
) -> None:
    path = tmp_path / "story"
    settings = fleet(paths, preset, path, pages)
    with InProcess(settings) as server:
        follow(server, asked(paths))
        report = server.device.snapshot()
    (life,) = read_device_stories(path)
    found = replay(life)
    assert found.difference is None, found.difference
    assert found.stray is None
    assert life.over
    ended = [e for entry in life.entries for e in entry.get("ended", ())]
    ends = Counter(e.get("finished", e.get("failed")) for e in ended)
    assert {"length", "stop", "cancelled"} <= set(ends), ends
    assert sum(m.cached_tokens for m in report.models) > 0
    if preset != "static":
        assert sum(m.evictions for m in report.models) > 0
    if preset == "balloon":
        assert sum(m.preemptions for m in report.models) > 0
    result = report_story([life], preset)
    assert result.report.total.answered == ends["length"] + ends["stop"]
    assert result.prefills.number + result.decodes.number == report.jobs
    assert result.report.total.preemptions <= sum(m.preemptions for m in report.models)
    # A story says nothing of what was said: nobody's tokens are in it, as lists or as text.
    text = path.read_text()
    for entry in map(json.loads, text.splitlines()):
        assert not {"tokens", "prompt", "token"} & set(entry)


def test_what_operators_do_replays_too(paths: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "story"
    settings = fleet(paths, "balloon", path, 200)
    fewer = replace(settings, models=tuple(model(paths, name) for name in ("base", "other")))

    def order(wanted: DeviceCommand) -> CommandOutcome:
        outcome = ordered(server, wanted)
        assert outcome.code is None, outcome
        return outcome

    with InProcess(fewer) as server:
        requests = asked(paths)
        for r in (r for r in requests if r.model != "tuned"):
            server.submit(r)
        order(Add(model(paths, "tuned")))
        for r in (r for r in requests if r.model == "tuned"):
            server.submit(r)
        order(EvictCommand("other"))
        change = Change(
            model="base",
            slo=Slo(ttft=9.0, tpot=1.0),
            priority=3,
            max_waiting=50,
            queue_seconds=None,
            max_running=2,
            pinned=True,
        )
        order(change)
        server.wait()
        order(ReleaseMemory())
        order(ActivateCommand("other"))
        assert ordered(server, EvictCommand("base")).code == "refused"
        order(Remove("other", 10.0))
        order(Add(model(paths, "other")))
        follow(server, [replace(r, id=f"{r.id}-later") for r in requests])
    (life,) = read_device_stories(path)
    found = replay(life)
    assert found.difference is None, found.difference
    assert found.stray is None
    done = Counter(e["action"] for e in life.entries if e.get("by") == "operator")
    assert done["Join"] == 2
    assert done["Leave"] == done["Change"] == done["ReleaseMemory"] == 1


def test_memory_that_the_machine_did_not_have_cannot_be_replayed(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "story"
    with InProcess(fleet(paths, "balloon", path, 200)) as server:
        pool = server.device.state.pool
        refused: list[int] = []
        fill = pool.free_pages.fill

        def scant(pages: list[int]) -> object:
            if not refused:
                refused.append(len(pages))
                return Short(len(pages))
            return fill(pages)

        monkeypatch.setattr(pool.free_pages, "fill", scant)
        server.generate(asked(paths)[:3])
    assert refused
    (life,) = read_device_stories(path)
    found = replay(life)
    assert found.difference is None
    assert found.stray is not None
    assert "no memory" in found.stray
