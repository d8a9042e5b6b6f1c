"""OpenAI's agents as their users write them. Run as a script: what came of it, as JSON on the last
line.

Arguments: the address of a server with real models, that of one that repeats prompts, a model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

ASKED = "What floats?"


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Rom", "Ulm"]


async def main() -> None:
    real, _, name = sys.argv[1:]
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=real, api_key="none", max_retries=0)
    called: list[str] = []

    @function_tool
    def forecast(city: Literal["Rom", "Ulm"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "It rains."

    def agent(model: str, **more: Any) -> Agent:
        settings = {"max_tokens": 300, "temperature": 0.0, **more.pop("settings", {})}
        return Agent(
            name="guide",
            instructions="Be brief.",
            model=OpenAIResponsesModel(model, client),
            model_settings=ModelSettings(**settings),
            **more,
        )

    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    # With a form, so that the last answer ends before `max_tokens`.
    caller = agent(name, tools=[forecast], output_type=Forecast, settings=forced)
    whole = await Runner.run(caller, ASKED)
    first, called = called, []
    streaming = Runner.run_streamed(caller, ASKED)
    events = [event async for event in streaming.stream_events()]
    raw = [event.data.type for event in events if event.type == "raw_response_event"]
    shaped = await Runner.run(agent(name, output_type=Forecast), ASKED)
    try:
        await Runner.run(agent("nobody"), ASKED)
        refused = ""
    except openai.NotFoundError as error:
        refused = str(error)
    got = {
        "items": [item.type for item in whole.new_items],
        "final": whole.final_output.city,
        "called": first,
        "requests": whole.context_wrapper.usage.requests,
        "streamed": streaming.final_output.city,
        "streamed_called": called,
        "deltas": raw.count("response.output_text.delta"),
        "shaped": shaped.final_output.city,
        "refused": refused,
    }
    print(json.dumps(got))


if __name__ == "__main__":
    asyncio.run(main())
