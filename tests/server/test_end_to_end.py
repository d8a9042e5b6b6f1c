"""The whole way: official client, server, worker, and real (tiny, random) models in float32."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.process import ServerProcess, until
from tests.server.test_api import sample, usage

MODELS = ("atlas-chat", "wren-mini")
MODEL = MODELS[0]
MESSAGES: Any = [{"role": "user", "content": "What floats — and why? 🛳️"}]
LONG = 400
"""Tokens, of a context of 512."""


@pytest.fixture(scope="module")
def client(real: ServerProcess) -> OpenAI:
    return real.client


def complete(client: OpenAI, **more: Any) -> str:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "A ship", "max_tokens": 24}
    return client.completions.create(**(arguments | more)).choices[0].text


@pytest.mark.parametrize("model", MODELS)
def test_the_first_token_is_that_of_transformers(
    client: OpenAI, fleet_file: Path, model: str
) -> None:
    path = fleet_file.parent / model
    tokenizer = AutoTokenizer.from_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        logprobs = reference(ids).logits[0, -1].log_softmax(-1)
    best = logprobs.topk(2)
    assert best.values[0] - best.values[1] > 1e-4, "a tie: choose another prompt"

    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=1, logprobs=True
    )
    assert usage(answer).prompt_tokens == ids.shape[1]
    content = answer.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    (token,) = content.content
    raw = bytes(token.bytes or [])
    assert raw.decode(errors="replace") == tokenizer.decode([int(best.indices[0])])
    assert math.isclose(token.logprob, float(best.values[0]), abs_tol=1e-4)


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": MESSAGES, "seed": 5, "max_tokens": 40}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert usage(chunks[-1]).completion_tokens == usage(whole).completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_seeds_reproduce_and_missing_seeds_are_drawn(client: OpenAI) -> None:
    assert complete(client, seed=7) == complete(client, seed=7)
    assert complete(client, seed=7) != complete(client, seed=8)
    assert complete(client) != complete(client)
    assert complete(client, temperature=0, seed=7) == complete(client, temperature=0, seed=8)
    both = client.completions.create(model=MODEL, prompt="A ship", max_tokens=24, seed=7, n=2)
    assert both.choices[0].text == complete(client, seed=7)
    assert both.choices[1].text != both.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_work_as_well(client: OpenAI, stream: bool) -> None:
    free = complete(client, temperature=0, max_tokens=60, extra_body={"ignore_eos": True})
    stop = free[20:23]
    arguments: Any = {
        "model": MODEL,
        "prompt": "A ship",
        "temperature": 0,
        "max_tokens": 60,
        "stop": [stop],
        "extra_body": {"ignore_eos": True},
    }
    if stream:
        chunks = list(client.completions.create(**arguments, stream=True))
        text = "".join(c.choices[0].text for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**arguments)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert usage(answer).completion_tokens < 60
    assert text == free[: free.index(stop)]
    assert reason == "stop"


def test_cached_tokens_are_counted_where_a_stop_string_ends_the_answer(client: OpenAI) -> None:
    prompt = "the harbour of the old town " * 12
    arguments: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 5}
    whole = client.completions.create(**arguments)
    assert cached(client.completions.create(**arguments)) > 0
    stopped = client.completions.create(**arguments, stop=whole.choices[0].text[2])
    assert stopped.choices[0].finish_reason == "stop"
    assert cached(stopped) == cached(client.completions.create(**arguments))


def test_choices_do_not_count_what_the_first_of_them_has_cached(client: OpenAI) -> None:
    prompt = "a lighthouse stands on every cape " * 8
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, n=3)
    assert cached(answer) == 0


def cached(answer: Any) -> int:
    return int(usage(answer).prompt_tokens_details.cached_tokens)


def test_both_models_at_once(real: ServerProcess) -> None:
    async def scenario() -> None:
        async with real.async_client() as client:

            async def one(i: int) -> tuple[str, str]:
                answer = await client.completions.create(
                    model=MODELS[i % 2], prompt=f"Ship {i // 4}", temperature=0, max_tokens=20
                )
                return f"{i % 2} {i // 4}", answer.choices[0].text

            answers = await asyncio.gather(*(one(i) for i in range(24)))
        assert len(set(answers)) == len({key for key, _ in answers})

    asyncio.run(scenario())


def test_errors_of_the_worker_and_of_the_server(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", max_tokens=512)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="a")


async def long_streams(client: openai.AsyncOpenAI, n: int) -> list[Any]:
    """Two long streams, past their first token, of `n` choices each."""
    arguments: Any = {
        "model": MODEL,
        "prompt": [[9, 8, 7]] * n,
        "max_tokens": LONG,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    streams = [await client.completions.create(**arguments) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    return streams


def kv_is_back(running: ServerProcess) -> bool:
    """Whether nothing runs, and all KV pages are free or cached: one reading of all of it."""
    state = running.http.get("/admin/state").json()
    reports = [model["report"] for model in state["models"]]
    return all(r["running"] == r["waiting"] == 0 for r in reports) and all(
        r["kv_pages"] == r["cached_pages"] for r in reports
    )


def test_a_client_that_leaves_frees_its_memory(real: ServerProcess) -> None:
    done = sample(real, "vllm_request_success_total", model_name=MODEL, finished_reason="length")

    async def scenario() -> None:
        async with real.async_client() as client:
            for stream in await long_streams(client, 16):
                await stream.close()

    def left() -> float:
        return sample(real, "vllm_request_success_total", model_name=MODEL, finished_reason="abort")

    with real.holding():  # no request can end before its client has gone
        asyncio.run(scenario())
        until(lambda: left() == 2 * 16)
    until(lambda: kv_is_back(real))
    now = sample(real, "vllm_request_success_total", model_name=MODEL, finished_reason="length")
    assert now == done, "the requests were finished, not cancelled"
    # Of those that had begun, the worker has told how long they waited.
    begun = sample(real, "vllm_time_to_first_token_seconds_count", model_name=MODEL)
    assert sample(real, "vllm_request_queue_time_seconds_count", model_name=MODEL) == begun > 2
