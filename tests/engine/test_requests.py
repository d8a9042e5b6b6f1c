"""What one request may ask for: a function of its tokens alone, whatever happens to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.actions import Preempt
from ballast.core.event import (
    FailedOutput,
    Output,
    PauseEvent,
    PromptScoresOutput,
    ResumeEvent,
    TokenOutput,
)
from ballast.core.request import RequestState, Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.engine.apply import apply
from ballast.fleet.tokenizer import train_tokenizer
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import make_llama

VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "on": {"type": "boolean"},
    },
    "required": ["name", "sizes", "on"],
    "additionalProperties": False,
}
GRAMMAR: str = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": " ?"})
PENALISED = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "logit_bias": ((5, 3.0), (9, -4.0)),
    "banned": (2, 7),
    "min_tokens": 12,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer is of whole words and single bytes."""
    directory = make_llama(tmp_path_factory.mktemp("requests") / "a", 3, vocab_size=VOCAB)
    train_tokenizer(['{"name": "x", "sizes": [1, 2]} true false'] * 5, VOCAB, 256).save_pretrained(
        directory
    )
    return directory


def fleet(path: Path, **model: object) -> FleetSettings:
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, step_logits=8, threads=1
    )
    settings = ModelSettings(name="a", path=str(path), dtype="float32", **model)  # type: ignore[arg-type]
    return FleetSettings(models=(settings,), device=device)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[InProcess]:
    with InProcess(fleet(path)) as server:
        yield server


def asked(name: str, n: int = 40, prompt: int = 37, **sampling: object) -> Submission:
    return Submission(
        id=name,
        model="a",
        prompt=tuple((7 * k + 11) % VOCAB for k in range(prompt)),
        max_tokens=n,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        ignore_eos=True,
    )


def answer(server: InProcess, submission: Submission) -> Answer:
    return server.generate([submission])[submission.id]


def disturbed(server: InProcess, submission: Submission, every: int = 5) -> Answer:
    """Preempted after each `every` tokens."""
    state = server.device.state

    def disturb(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput) and output.index % every == every - 1:
            apply(state, Preempt("a", output.request_id, why="a test"), [])

    server.listen = disturb
    try:
        return answer(server, submission)
    finally:
        server.listen = None


WAYS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.95, "min_p": 0.01},
    "greedy penalised": PENALISED,
    "seeded penalised": {"temperature": 1.1, "seed": 6, **PENALISED},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_after_preemptions_and_after_a_crash(
    server: InProcess, way: str
) -> None:
    asking = asked(f"{way} whole", **WAYS[way])
    whole = answer(server, asking)
    assert len(set(whole.tokens)) > 8
    again = disturbed(server, replace(asking, id=f"{way} disturbed"))
    assert again.finished.preemptions > 3
    assert again.tokens == whole.tokens
    for n in (0, 1, 17, 39):
        had = tuple(whole.tokens[:n])
        rest = answer(server, replace(asking, id=f"{way} {n}", resumed=had))
        assert [*had, *rest.tokens] == whole.tokens
        assert rest.finished.output_tokens == 40
        assert rest.finished.prompt_tokens == 37


@pytest.mark.parametrize("cached", [True, False])
def test_a_paused_request_goes_on_with_the_tokens_it_would_have_had(
    path: Path, cached: bool, tmp_path: Path
) -> None:
    """Its client reads again whenever another request, which runs meanwhile, has a token more."""
    settings = replace(fleet(path), story_path=str(tmp_path / "story"))
    settings = replace(settings, device=replace(settings.device, prefix_cache=cached))
    asking = asked("paused", n=60, prompt=75, temperature=0.9, seed=7, **PENALISED)
    asking = replace(asking, prompt_logprobs=0)
    with InProcess(settings) as server:
        whole = answer(server, replace(asking, id="whole"))
        state = server.device.state
        pauses = 0

        def disturb(now: float, output: Output) -> None:
            nonlocal pauses
            request = state.requests.get("paused")
            if request is None:
                return
            if output.request_id == "paused":
                if "beside it" in state.requests:
                    server.device.post(PauseEvent("paused"))
            elif request.state is RequestState.PAUSED or not isinstance(output, TokenOutput):
                pauses += request.state is RequestState.PAUSED
                assert request.blocks == []
                server.device.post(ResumeEvent("paused"))

        server.listen = disturb
        beside = asked("beside it", n=200)
        again = server.generate([asking, beside])["paused"]
        server.drain()
        for m in state.models.values():
            m.kv.validate([])
        state.pool.validate()
    assert pauses > 10
    assert again.tokens == whole.tokens
    assert scored(again, 75) == pytest.approx(scored(whole, 75), abs=1e-4)
    assert again.finished.preemptions == 0
    (life,) = read_device_stories(tmp_path / "story")
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


def test_the_index_of_a_resumed_output_goes_on(server: InProcess) -> None:
    whole = answer(server, asked("counted"))
    result: list[Output] = []
    server.listen = lambda now, output: result.append(output)
    answer(server, replace(asked("counted on"), resumed=tuple(whole.tokens[:30])))
    server.listen = None
    assert [o.index for o in result if isinstance(o, TokenOutput)] == list(range(30, 40))


def test_an_output_that_was_complete_ends_at_once(server: InProcess) -> None:
    long = answer(server, replace(asked("complete", n=5), resumed=(1, 2, 3, 4, 5)))
    assert (long.tokens, long.finished.reason, long.finished.output_tokens) == ([], "length", 5)
    stopped = replace(asked("stopped"), resumed=(1, 2, 3), stop_token_ids=(3,))
    ended = answer(server, stopped)
    assert (ended.tokens, ended.finished.reason, ended.finished.output_tokens) == ([], "stop", 3)


def test_min_tokens_keeps_the_end_away(server: InProcess) -> None:
    free = answer(server, asked("free"))
    stop = free.tokens[2]
    early = answer(server, replace(asked("early"), stop_token_ids=(stop,)))
    assert early.finished.reason == "stop"
    assert len(early.tokens) == free.tokens.index(stop) + 1
    late = replace(asked("late", banned=(stop,), min_tokens=20), stop_token_ids=(stop,))
    kept = answer(server, late)
    assert stop not in kept.tokens[:20]
    assert len(kept.tokens) >= 20


def test_tokens_that_the_model_does_not_have_are_refused(server: InProcess) -> None:
    plain = asked("plain")
    for i, wrong in enumerate(
        [
            replace(plain, prompt=(1, VOCAB)),
            replace(plain, prompt=(-1, 1)),
            asked("bias", logit_bias=((VOCAB + 3, 1.0),)),
            asked("ban", banned=(VOCAB,), min_tokens=1),
        ]
    ):
        end = answer(server, replace(wrong, id=f"wrong {i}")).end
        assert isinstance(end, FailedOutput)
        assert end.code == "invalid_request"
        assert "there is no token" in end.reason


def test_a_request_that_was_accepted_is_taken_again_from_a_full_queue(path: Path) -> None:
    with InProcess(fleet(path, max_waiting=0)) as server:
        refused = answer(server, asked("new", n=3)).end
        assert isinstance(refused, FailedOutput)
        assert refused.code == "queue_full"
        assert answer(server, replace(asked("old", n=3), resumed=())).finished


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_grammar_holds_across_preemptions_and_crashes(
    server: InProcess, path: Path, temperature: float
) -> None:
    name = f"grammar {temperature}"
    asking = asked(name, n=200, grammar=GRAMMAR, temperature=temperature, seed=4, min_tokens=3)
    whole = answer(server, asking)
    assert whole.finished.reason == "stop"
    text = AutoTokenizer.from_pretrained(path).decode(whole.tokens, skip_special_tokens=True)
    found = json.loads(text)
    assert set(found) == {"name", "sizes", "on"}
    assert isinstance(found["name"], str)
    assert all(isinstance(n, int) for n in found["sizes"])
    assert isinstance(found["on"], bool)
    again = disturbed(server, replace(asking, id=f"{name} disturbed"), every=3)
    assert again.finished.preemptions > 1
    assert again.tokens == whole.tokens
    for n in (0, 1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        had = tuple(whole.tokens[:n])
        rest = answer(server, replace(asking, id=f"{name} {n}", resumed=had))
        assert [*had, *rest.tokens] == whole.tokens
        assert rest.finished.reason == "stop"


def test_a_grammar_at_fault_fails_its_request_alone(server: InProcess) -> None:
    requests = [asked("sound 1"), asked("at fault", grammar="nonsense {"), asked("sound 2")]
    answers = server.generate(requests)
    failed = answers["at fault"].end
    assert isinstance(failed, FailedOutput)
    assert failed.code == "invalid_request"
    assert "grammar" in failed.reason
    for name in ("sound 1", "sound 2"):
        assert answers[name].finished.output_tokens == 40


def scored(answer: Answer, prompt: int) -> list[float]:
    """The scores of a whole prompt, from parts that follow each other."""
    values: list[float] = []
    for part in answer.prompt:
        assert part.start == 1 + len(values)
        values += part.logprobs
    assert len(values) == prompt - 1
    return values


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_scores_come_once_and_are_those_of_transformers(
    server: InProcess, path: Path, top: int
) -> None:
    plain = asked(f"cached {top}", n=6, prompt=75)
    answer(server, plain)
    asking = replace(plain, id=f"scored {top}", prompt_logprobs=top)
    result = answer(server, asking)
    assert result.tokens == answer(server, replace(plain, id=f"unscored {top}")).tokens
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = reference(torch.tensor([asking.prompt])).logits[0].log_softmax(-1)
    expected = [float(exact[i, t]) for i, t in enumerate(asking.prompt[1:])]
    assert scored(result, 75) == pytest.approx(expected, abs=1e-4)
    assert len(result.prompt) > 5, "a job has eight logits at most"
    likeliest = [t for part in result.prompt for t in part.top]
    if top:
        assert [[t for t, _ in at] for at in likeliest] == exact[:-1].topk(2).indices.tolist()
    else:
        assert likeliest == []

    # A preemption in the middle of the prompt: what was told is not told again.
    def disturb(now: float, output: Output) -> None:
        if isinstance(output, PromptScoresOutput) and output.start % 3 == 0:
            apply(server.device.state, Preempt("a", output.request_id, why="a test"), [])

    server.listen = disturb
    again = answer(server, replace(asking, id=f"scored again {top}"))
    server.listen = None
    assert again.finished.preemptions > 0
    assert scored(again, 75) == pytest.approx(expected, abs=1e-4)
    assert again.tokens == result.tokens


def test_a_prompt_may_be_scored_without_an_answer(server: InProcess) -> None:
    result = answer(server, replace(asked("only scored", n=0, prompt=40), prompt_logprobs=0))
    assert (result.tokens, result.finished.reason, result.finished.output_tokens) == (
        [],
        "length",
        0,
    )
    assert len(scored(result, 40)) == 39
    short = answer(server, replace(asked("one token", n=0, prompt=1), prompt_logprobs=0))
    assert (short.prompt, short.finished.output_tokens) == ([], 0)


def test_only_embedding_models_embed(server: InProcess) -> None:
    end = answer(server, replace(asked("embed"), embed=True)).end
    assert isinstance(end, FailedOutput)
    assert end.code == "invalid_request"
    assert "not an embedding model" in end.reason


def test_who_is_not_admitted_in_time_is_told_so(path: Path) -> None:
    with InProcess(fleet(path, max_running=1)) as server:
        m = server.device.state.models["a"]

        def follow(now: float, output: Output) -> None:
            if isinstance(output, TokenOutput) and output.index == 0:
                m.spec = replace(m.spec, queue_seconds=0.0)
                server.submit(asked("late", n=3))

        server.listen = follow
        assert answer(server, asked("long", n=200)).finished.output_tokens == 200
        late = server.answers["late"].end
        assert isinstance(late, FailedOutput)
        assert late.code == "queue_timeout"


def test_an_embedding_model_embeds(path: Path, tmp_path: Path) -> None:
    directory = tmp_path / "embeds"
    shutil.copytree(path, directory)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    kinds = ("Transformer", "Pooling", "Normalize")
    steps = [
        {"path": "1_Pooling" if i == 1 else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    reference = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with InProcess(fleet(directory)) as server:
        assert server.device.specs["a"].embeds
        lengths = (1, 17, 90, 256)  # the last is as long as the context
        asking = [replace(asked(str(n), prompt=n), embed=True) for n in lengths]
        answers = server.generate([*asking, asked("text", n=5)])
        again = answer(server, replace(asking[2], id="cached"))
    assert answers["text"].finished.output_tokens == 5
    assert again.finished.cached_tokens > 0
    for prompt, result in [*((s, answers[s.id]) for s in asking), (asking[2], again)]:
        with torch.inference_mode():
            hidden = reference(torch.tensor([prompt.prompt])).last_hidden_state[0, -1]
        assert result.embedding is not None
        values = torch.frombuffer(bytearray(result.embedding), dtype=torch.float32)
        torch.testing.assert_close(values, hidden / hidden.norm(), atol=1e-5, rtol=0)
        assert (result.finished.reason, result.finished.output_tokens) == ("stop", 0)
