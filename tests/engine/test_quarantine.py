"""A model whose requests fail with non-finite numbers in succession is set aside; others serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.bench.inprocess import InProcess
from ballast.core.actions import ActivateCommand
from ballast.core.errors import NonFiniteOutput
from ballast.core.event import FailedOutput, FinishedOutput, JobResult
from ballast.core.job import SequenceWork
from ballast.core.request import Submission
from ballast.engine.quarantine import MOST_FAILURES, Quarantine
from tests.engine.test_failed_jobs import settled
from tests.live.test_command_executor import ordered
from tests.live.test_live_device import asked, fleet, paths  # noqa: F401

Work = Sequence[SequenceWork]
CODE = NonFiniteOutput.code


def sick(server: InProcess, model: str, fails: Callable[[str], bool]) -> None:
    """Have requests of a model whose id `fails` end as if their logits were NaN."""
    (executor,) = server.device.executors[model]
    run = executor.run

    def damaged(work: Work) -> list[JobResult]:
        return [
            FailedOutput(r.request_id, CODE, "NaN") if fails(r.request_id) else r for r in run(work)
        ]

    executor.run = damaged  # type: ignore[method-assign]


def one(id: str, model: str = "a") -> Submission:
    return replace(asked(1, models=(model,))[0], id=id, max_tokens=3)


def end_of(server: InProcess, request: Submission) -> FailedOutput | FinishedOutput:
    end = server.generate([request])[request.id].end
    assert isinstance(end, FailedOutput | FinishedOutput)
    return end


def test_it_is_set_aside_after_some_failures_and_an_operator_serves_it_again(
    paths: dict[str, Path],  # noqa: F811
) -> None:
    with InProcess(fleet(paths)) as server:
        sick(server, "a", lambda id: id.startswith("bad"))
        for i in range(MOST_FAILURES - 1):
            assert end_of(server, one(f"bad{i}")).code == CODE
        assert isinstance(end_of(server, one("good")), FinishedOutput), "which begins anew"
        for i in range(MOST_FAILURES):
            assert end_of(server, one(f"bad-again{i}")).code == CODE
        refused = end_of(server, one("later"))
        assert isinstance(refused, FailedOutput)
        assert refused.code == "model_failed"
        assert f"'a' is set aside after {MOST_FAILURES} failures in succession" in refused.reason
        aside = {m.name: m.set_aside for m in server.device.snapshot().models}
        assert aside == {"a": {"a": refused.reason}, "b": {}, "c": {}}
        assert isinstance(end_of(server, one("other", "b")), FinishedOutput)
        assert ordered(server, ActivateCommand("a", "by an operator")).code is None
        assert isinstance(end_of(server, one("healed")), FinishedOutput)
        settled(server)


def test_its_open_requests_end_with_the_reason_and_no_others(
    paths: dict[str, Path],  # noqa: F811
) -> None:
    """Many at once: some in the job that sets it aside, some running beside it, some waiting."""
    requests = [one(f"a{i}") for i in range(100)] + [one("b0", "b")]
    with InProcess(fleet(paths)) as server:
        sick(server, "a", lambda id: True)
        answers = server.generate(requests)
        settled(server)
    assert isinstance(answers["b0"].end, FinishedOutput)
    codes = [answers[r.id].end.code for r in requests[:-1]]
    assert set(codes) == {CODE, "model_failed"}
    assert codes.count(CODE) >= MOST_FAILURES


def test_an_adapter_is_counted_apart_from_its_base() -> None:
    quarantine = Quarantine()
    for _ in range(MOST_FAILURES - 1):
        assert quarantine.failed("lora", "NaN") is None
        quarantine.succeeded("base")
    assert quarantine.failed("lora", "NaN") is not None
    assert list(quarantine.reasons) == ["lora"]
    quarantine.lift(["base", "lora"])
    assert not quarantine.reasons
    assert quarantine.failed("lora", "NaN") is None
