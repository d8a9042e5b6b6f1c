"""Other people's clients, unmodified: OpenAI's and Anthropic's, LiteLLM, LangChain and agents.

The last three each in a process of its own, as their users would start them: they warn when
imported. LiteLLM in an environment of its own as well: it takes no new `openai`, and the tests have
the newest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError, pydantic_function_tool
from pydantic import BaseModel

from tests.server.client_environments import python_with
from tests.server.process import DEADLINE, ServerProcess

MODEL = "wren-mini"
"""Has a tool dialect; embeds on the echo server."""
SAID: Any = [{"role": "user", "content": "What floats?"}]


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Rom", "Ulm"]


@cache
def printed(
    client: str, real: ServerProcess, echo: ServerProcess, python: str = sys.executable
) -> Any:
    """What a client's script prints last."""
    script = Path(__file__).with_name(f"client_{client}.py")
    # LiteLLM would fetch a list of prices.
    apart = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    done = subprocess.run(
        (python, script, real.url, echo.url, MODEL),
        env=os.environ | apart,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def litellm_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with LiteLLM, and what it needs, alone."""
    return python_with("litellm[mcp]>=1.110,<2", tmp_path_factory)


@pytest.mark.slow
def test_litellm_is_told_what_openais_client_is(
    litellm_python: str, real: ServerProcess, echo: ServerProcess
) -> None:
    check_told_the_same(printed("litellm", real, echo, litellm_python), real)


def test_langchain_is_told_what_openais_client_is(real: ServerProcess, echo: ServerProcess) -> None:
    check_told_the_same(printed("langchain", real, echo), real)


def check_told_the_same(got: Any, real: ServerProcess) -> None:
    same: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "seed": 3}
    chat = real.client.chat.completions.create(messages=SAID, **same)
    text = real.client.completions.create(prompt="A ship", **same)
    assert chat.choices[0].message.content
    assert got["chat"] == got["streamed"] == chat.choices[0].message.content
    assert got["text"] == got["text_streamed"] == text.choices[0].text
    assert got["end"] == chat.choices[0].finish_reason
    assert chat.usage is not None
    assert [got["tokens"]] == got["streamed_tokens"] == [chat.usage.completion_tokens]
    assert got["parts"] > 2
    name, arguments = got["call"]
    assert name.lower() == "forecast"
    assert arguments["city"] in ("Rom", "Ulm")
    assert got["call_streamed"] == got["call"]
    assert got["call_end"] == "tool_calls"
    assert 0 < got["then_tokens"] <= 9
    assert set(got.get("shaped", {}).values()) <= {"Rom", "Ulm"}
    assert got["vectors"] == [8, 8]
    assert "nobody" in got["refused"]


def test_openais_helpers_read_our_answers_and_streams(real: ServerProcess) -> None:
    client = real.client.chat.completions
    asked: dict[str, Any] = {"model": MODEL, "messages": SAID, "max_tokens": 300, "seed": 3}
    parsed = client.parse(response_format=Forecast, **asked)
    assert isinstance(parsed.choices[0].message.parsed, Forecast)
    assert parsed._request_id

    tools = [pydantic_function_tool(Forecast)]
    calling: dict[str, Any] = {"tools": tools, "tool_choice": "required", **asked}
    [call] = client.parse(parallel_tool_calls=False, **calling).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Forecast)
    with client.stream(parallel_tool_calls=False, **calling) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.done" in kinds


@pytest.mark.slow
def test_litellm_reads_the_messages_and_responses_apis(
    litellm_python: str, real: ServerProcess, echo: ServerProcess
) -> None:
    got = printed("litellm", real, echo, litellm_python)
    for api, tokens in ((got["messages"], 9), (got["responses"], 18)):
        chat = real.client.chat.completions.create(
            model=MODEL, messages=SAID, max_tokens=tokens, temperature=0
        )
        assert chat.usage is not None
        assert api["text"] == api["streamed"] == chat.choices[0].message.content
        assert api["end"] == "length"
        assert api["tokens"] == [chat.usage.prompt_tokens, chat.usage.completion_tokens]
        name, arguments = api["call"]
        assert name == "forecast"
        assert arguments["city"] in ("Rom", "Ulm")
        assert api["call_streamed"] == api["call"]
        assert api["call_end"] == "tool_calls"
        assert 0 < api["then_tokens"] <= tokens
        assert "nobody" in api["refused"]


def test_agents_call_functions_and_go_on(real: ServerProcess, echo: ServerProcess) -> None:
    got = printed("agents", real, echo)
    assert got["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    [city] = got["called"]
    assert city in ("Rom", "Ulm")
    assert got["streamed"] == got["final"]
    assert got["deltas"] > 1
    assert got["streamed_called"] == [city]
    assert got["shaped"] in ("Rom", "Ulm")
    assert got["requests"] == 2
    assert "nobody" in got["refused"]


def test_openais_client_reads_our_responses(real: ServerProcess) -> None:
    client = real.client.responses
    asked: dict[str, Any] = {"model": MODEL, "input": SAID, "extra_body": {"seed": 3}}
    chat = real.client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=9, seed=3)
    whole = client.create(max_output_tokens=9, **asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole._request_id
    with client.stream(max_output_tokens=9, **asked) as stream:
        events = list(stream)
    text = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert text[-1] == whole.output_text

    asked["max_output_tokens"] = 300
    with client.stream(text_format=Forecast, **asked) as stream:
        streamed = stream.get_final_response()
    for parsed in (client.parse(text_format=Forecast, **asked), streamed):
        assert isinstance(parsed.output_parsed, Forecast)
        assert parsed.status == "completed"

    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.parse(tools=[pydantic_function_tool(Forecast)], **asked).output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Forecast)
    with pytest.raises(BadRequestError, match="no response is kept here"):
        client.create(previous_response_id="resp_1", **asked)


def test_anthropics_client_reads_our_messages(real: ServerProcess) -> None:
    import anthropic  # takes two seconds

    client = anthropic.Anthropic(
        base_url=real.base, api_key="none", max_retries=0, timeout=DEADLINE
    )
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": SAID,
        "max_tokens": 9,
        "extra_body": {"seed": 3},
    }
    chat = real.client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=9, seed=3)
    with client:
        whole = client.messages.create(**asked)
        assert whole.content[0].text == chat.choices[0].message.content
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 9)
        assert whole._request_id
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
        counted = client.messages.count_tokens(model=MODEL, messages=SAID)
        assert counted.input_tokens == whole.usage.input_tokens

        asked["max_tokens"] = 300
        parsed = client.messages.parse(output_format=Forecast, **asked)
        assert isinstance(parsed.parsed_output, Forecast)
        assert parsed.stop_reason == "end_turn"

        schema = {**Forecast.model_json_schema(), "additionalProperties": False}
        tool = {"name": "forecast", "input_schema": schema}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        calling: dict[str, Any] = {**asked, "tools": [tool], "tool_choice": choice}
        called = client.messages.create(**calling)
        [call] = called.content
        assert (call.type, called.stop_reason) == ("tool_use", "tool_use")
        assert Forecast.model_validate(call.input)
        with client.messages.stream(**calling) as stream:
            kinds = {event.type for event in stream}
            [streamed] = stream.get_final_message().content
        assert streamed.input == call.input
        assert "input_json" in kinds

        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        history = [*SAID, called.to_param(), {"role": "user", "content": [result]}]
        more: dict[str, Any] = {**asked, "max_tokens": 9, "messages": history, "tools": [tool]}
        client.messages.create(**more)
        again = client.messages.create(**more).usage
        assert again.cache_read_input_tokens
        total = client.messages.count_tokens(model=MODEL, messages=history, tools=[tool])
        assert again.input_tokens + again.cache_read_input_tokens == total.input_tokens

        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(**{**asked, "model": "nobody"})
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match="'image' cannot be read here"):
            client.messages.create(**{**asked, "messages": [{"role": "user", "content": [image]}]})
