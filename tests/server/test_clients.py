"""Other people's clients, unmodified: OpenAI's helpers, LiteLLM and LangChain.

The last two each in a process of its own, as their users would start them: they warn when imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from tests.server.process import DEADLINE, ServerProcess

MODEL = "wren-mini"
"""Has a tool dialect; embeds on the echo server."""
SAID: Any = [{"role": "user", "content": "What floats?"}]


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Rom", "Ulm"]


def told(client: str, real: ServerProcess, echo: ServerProcess) -> Any:
    """What a client's script prints last."""
    script = Path(__file__).with_name(f"client_{client}.py")
    # LiteLLM would fetch a list of prices.
    apart = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    done = subprocess.run(
        (sys.executable, script, real.url, echo.url, MODEL),
        env=os.environ | apart,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_a_client_is_told_what_openais_is(
    client: str, real: ServerProcess, echo: ServerProcess
) -> None:
    got = told(client, real, echo)
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
