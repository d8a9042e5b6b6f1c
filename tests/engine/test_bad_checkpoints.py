"""Whatever one model does while it is read, sized or placed: it is named, the others are served."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.command import Add, CommandOutcome
from ballast.core.request import Submission
from ballast.core.settings import (
    AdapterSettings,
    DeviceSettings,
    FleetSettings,
    ModelSettings,
)
from ballast.core.units import GiB, KiB, MiB
from ballast.engine import build
from ballast.isolation.calls import A, Here, Isolation, R
from ballast.isolation.limits import Limits
from ballast.isolation.zygote import Zygote
from ballast.live.cpu_machine import CpuMachine
from ballast.weights.manifest import fork_zygote
from benchmarks.adapters import random_adapter
from tests.engine.checkpoints import make_llama

LIMITS = Limits(memory_bytes=1 * GiB, cpu_seconds=10, seconds=600.0)
DEADLINE = 600.0


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "good", 0)


@pytest.fixture(scope="module")
def isolation() -> Iterator[Zygote]:
    with fork_zygote(LIMITS) as zygote:
        yield zygote


def config(**changes: Any) -> Callable[[Path], None]:
    """Changes values of a copy's config.json."""

    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        (path / "generation_config.json").unlink()

    return change


def generation(path: Path) -> None:
    (path / "generation_config.json").write_text('{"eos_token_id": [2, null]}')


def brackets(path: Path) -> None:
    (path / "config.json").write_text("[" * 200_000)


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def nested_header(path: Path) -> None:
    header = b'{"x":' + b"[" * 200_000
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "end of text": (config(eos_token_id="x"), "eos_token_id"),
    "end of texts": (config(eos_token_id=["x"]), "eos_token_id"),
    "end of lists": (config(eos_token_id=[[1]]), "eos_token_id"),
    "end of nothing": (generation, r"eos_token_id is \[2, None\]"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "fewer layers": (config(num_hidden_layers=-3), "num_hidden_layers is -3"),
    "many layers": (config(num_hidden_layers=10**7), "num_hidden_layers is 10000000"),
    "brackets": (brackets, "nested too deeply"),
    "header": (nested_header, "corrupt header"),
    "huge": (config(hidden_size=2**34), "has shape|memory"),
    "list": (config(hidden_size=[64]), "hidden_size"),
    "quantised": (config(quantization_config={"quant_method": "aqlm", "bits": 4}), "aqlm"),
    "own code": (config(model_type="mine", auto_map={"AutoConfig": "mine.Mine"}), "never run"),
    "unknown": (config(model_type="mine"), "knows no such model"),
    "no weights": (no_weights, "has neither"),
}


def copied(good: Path, root: Path) -> dict[str, Path]:
    found = {}
    for name, (change, _) in BAD.items():
        found[name] = root / name
        shutil.copytree(good, found[name])
        change(found[name])
    return found


def fleet(paths: dict[str, Path], **device: Any) -> FleetSettings:
    models = tuple(ModelSettings(name=n, path=str(p), dtype="float32") for n, p in paths.items())
    sizes = {"budget_bytes": 16 * MiB, "page_bytes": 64 * KiB, "threads": 1, **device}
    return FleetSettings(
        models=models, device=DeviceSettings(step_tokens=32, step_logits=8, **sizes)
    )


def check_serves(server: InProcess, name: str) -> None:
    request = Submission(
        id=name, model=name, prompt=tuple(range(3, 20)), max_tokens=5, ignore_eos=True
    )
    tokens = server.generate([request])[name].tokens
    assert len(tokens) == 5
    state = server.device.state
    assert {
        o: n for o, n in server.device.snapshot().owners.items() if n
    } == state.pool.ledger.owners()
    state.pool.validate()
    state.arena.validate()
    for m in state.models.values():
        m.weights.validate()
        m.kv.validate([])


def test_the_others_are_served(good: Path, isolation: Zygote, tmp_path: Path) -> None:
    """When the device starts, and where they are added to one that serves."""
    bad = copied(good, tmp_path)
    # Between them, so that what comes before and after is seen to be served.
    paths = {"first": good, **bad, "last": good}
    with InProcess(fleet(paths), isolation=isolation) as server:
        assert set(server.device.specs) == {"first", "last"}
        failed = server.device.failed
        assert failed.keys() == BAD.keys()
        for name, (_, reason) in BAD.items():
            assert_matches(failed[name], reason)
            assert len(failed[name]) < 500
        assert "trust_remote_code" not in failed["own code"]
        for name in ("brackets", "end of lists", "many layers", "huge"):
            outcome = ordered(server, ModelSettings(name="new", path=str(bad[name])))
            assert outcome.code == "invalid", name
            assert_matches(outcome.reason, BAD[name][1])
        check_serves(server, "first")
        check_serves(server, "last")


def assert_matches(text: str, pattern: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"


def ordered(server: InProcess, settings: ModelSettings) -> CommandOutcome:
    ended = threading.Event()
    outcomes: list[CommandOutcome] = []
    server.device.command(Add(settings), lambda o: (outcomes.append(o), ended.set()))  # type: ignore[func-returns-value]
    assert ended.wait(DEADLINE)
    return outcomes[0]


@pytest.mark.parametrize("end", [10**30, [10**30, -1, 7], -1])
def test_end_tokens_that_no_output_has_are_left_out(
    good: Path, tmp_path: Path, end: object
) -> None:
    shutil.copytree(good, tmp_path / "model")
    config(eos_token_id=end)(tmp_path / "model")
    with InProcess(fleet({"m": tmp_path / "model"})) as server:
        known = server.device.specs["m"].eos_token_ids
        assert known == ((7,) if isinstance(end, list) else ())
        check_serves(server, "m")


class Adapters:
    """Isolation of adapters alone, which get little time."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def call(self, function: Callable[[A], R], argument: A, result: type[R]) -> R:
        how: Isolation = self._zygote if function.__name__ == "read_parts" else Here()
        return how.call(function, argument, result)


def test_an_adapter_whose_patterns_take_too_long(good: Path, tmp_path: Path) -> None:
    """It is named, its base and its siblings serve: each pattern takes milliseconds, and nothing
    bounds their number."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(good)
    many = {"rank_pattern": dict.fromkeys((f"(a|{i})*b" for i in range(200_000)), 8)}
    adapters = tuple(
        AdapterSettings(name=name, path=str(random_adapter(model, tmp_path / name, i, **more).path))
        for i, (name, more) in enumerate({"a": {}, "b": many, "c": {}}.items())
    )
    settings = fleet({"good": good})
    (base,) = settings.models
    settings = replace(settings, models=(replace(base, adapters=adapters),))
    limits = replace(LIMITS, cpu_seconds=1)
    with (
        fork_zygote(limits) as zygote,
        InProcess(settings, isolation=Adapters(zygote)) as server,
    ):
        assert [a.name for a in server.device.specs["good"].adapters] == ["a", "c"]
        assert server.device.failed.keys() == {"b"}
        assert_matches(server.device.failed["b"], "1 s of processor time")
        check_serves(server, "good")


def test_a_model_whose_activations_exceed_the_budget(good: Path, tmp_path: Path) -> None:
    wide = make_llama(
        tmp_path / "wide", 1, vocab_size=200_000, hidden_size=8, num_attention_heads=2
    )
    with InProcess(fleet({"wide": wide, "good": good})) as server:
        assert server.device.failed.keys() == {"wide"}
        assert_matches(server.device.failed["wide"], "for activations with wide")
        check_serves(server, "good")


@pytest.mark.parametrize("where", ["placed", "set up"])
def test_a_fault_that_nobody_foresaw(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    make_llama(tmp_path / "bad", 1)

    def failing(of: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if name(*arguments) == "bad":
                raise ZeroDivisionError("nobody foresaw this")
            return of(*arguments, **more)

        return call

    if where == "placed":
        made = failing(build.build_model, lambda hosted, *_: hosted.spec.name)
        monkeypatch.setattr(build, "build_model", made)
    else:
        made = failing(CpuMachine.executors, lambda machine, host, *_: host.spec.name)
        monkeypatch.setattr(CpuMachine, "executors", made)
    with InProcess(fleet({"bad": tmp_path / "bad", "good": good})) as server:
        assert server.device.failed == {"bad": "ZeroDivisionError: nobody foresaw this"}
        assert "weights:bad" not in server.device.snapshot().owners
        n_bytes = sum(server.device.specs["good"].segment_bytes)
        assert n_bytes <= server.device.tier.n_bytes < 2 * n_bytes
        check_serves(server, "good")
        outcome = ordered(server, ModelSettings(name="bad", path=str(tmp_path / "bad")))
        assert outcome.code == "broken"
        check_serves(server, "good")
