#!/usr/bin/env python3
"""Try unmodified clients, each at its newest version in an environment of its own.

    ballast serve fleets/demo/fleet.yaml &
    .venv/bin/python scripts/try_clients.py --url http://127.0.0.1:8000 --model atlas-chat

Each asks one question, whole and streamed where it can, at temperature 0 and with few tokens. It
works if it gets the text that plain HTTP gets. Needs a Python package index (by `uv` where it is
installed, which is quicker, else pip); those of JavaScript need `npm` and `node`, and are left out
without. Prints a table; status 1 if one does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ASK = "Name three parts of a ship."
TOKENS = 12
INSTALL_SECONDS, RUN_SECONDS = 900.0, 300.0


@dataclass(frozen=True)
class Client:
    """A client; `code` prints a JSON list of the text that it got, and that of a stream if any. It
    has the variables URL, MODEL, ASK and TOKENS."""

    api: str
    packages: str
    code: str
    js: bool = False

    @property
    def name(self) -> str:
        """Name of the package that is the client."""
        first = self.packages.split()[0]
        return first if first.startswith("@") else first.partition("[")[0]


OPENAI = "base_url=URL + '/v1', api_key='none'"
PYTHON = (
    Client(
        "chat",
        "openai",
        f"""
from openai import OpenAI
c = OpenAI({OPENAI})
a = dict(model=MODEL, messages=[dict(role='user', content=ASK)], temperature=0, max_tokens=TOKENS)
whole = c.chat.completions.create(**a).choices[0].message.content
parts = [d.choices[0].delta.content or '' for d in c.chat.completions.create(**a, stream=True)]
print(json.dumps([whole, ''.join(parts)]))
""",
    ),
    Client(
        "messages",
        "anthropic",
        """
from anthropic import Anthropic
c = Anthropic(base_url=URL, api_key='none')
a = dict(model=MODEL, messages=[dict(role='user', content=ASK)], max_tokens=TOKENS,
         extra_body=dict(temperature=0))
whole = c.messages.create(**a).content[0].text
with c.messages.stream(**a) as s:
    parts = list(s.text_stream)
print(json.dumps([whole, ''.join(parts)]))
""",
    ),
    Client(
        "ollama",
        "ollama",
        """
from ollama import Client
c = Client(host=URL)
a = dict(model=MODEL, messages=[dict(role='user', content=ASK)],
         options=dict(temperature=0, num_predict=TOKENS))
whole = c.chat(**a).message.content
print(json.dumps([whole, ''.join(p.message.content for p in c.chat(**a, stream=True))]))
""",
    ),
    Client(
        "chat",
        "openai-agents",
        f"""
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
m = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI({OPENAI}))
g = Agent(name='a', model=m, model_settings=ModelSettings(temperature=0, max_tokens=TOKENS))
print(json.dumps([Runner.run_sync(g, ASK).final_output]))
""",
    ),
    Client(
        "chat",
        "langchain-openai",
        f"""
from langchain_openai import ChatOpenAI
c = ChatOpenAI(model=MODEL, {OPENAI}, temperature=0, max_tokens=TOKENS)
print(json.dumps([c.invoke(ASK).content, ''.join(p.content for p in c.stream(ASK))]))
""",
    ),
    Client(
        "messages",
        "langchain-anthropic",
        """
from langchain_anthropic import ChatAnthropic
c = ChatAnthropic(model=MODEL, base_url=URL, api_key='none', temperature=0, max_tokens=TOKENS)
print(json.dumps([c.invoke(ASK).content]))
""",
    ),
    Client(
        "ollama",
        "langchain-ollama",
        """
from langchain_ollama import ChatOllama
c = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=TOKENS)
print(json.dumps([c.invoke(ASK).content, ''.join(p.content for p in c.stream(ASK))]))
""",
    ),
    Client(
        "chat",
        "litellm",
        f"""
import litellm
a = dict(model='openai/' + MODEL, messages=[dict(role='user', content=ASK)], temperature=0,
         max_tokens=TOKENS, {OPENAI})
whole = litellm.completion(**a).choices[0].message.content
parts = [d.choices[0].delta.content or '' for d in litellm.completion(**a, stream=True)]
print(json.dumps([whole, ''.join(parts)]))
""",
    ),
    Client(
        "chat",
        "pydantic-ai-slim[openai]",
        f"""
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
m = OpenAIChatModel(MODEL, provider=OpenAIProvider({OPENAI}))
g = Agent(m, model_settings=dict(temperature=0, max_tokens=TOKENS))
print(json.dumps([g.run_sync(ASK).output]))
""",
    ),
    Client(
        "chat",
        "llama-index-llms-openai-like",
        """
from llama_index.llms.openai_like import OpenAILike
c = OpenAILike(model=MODEL, api_base=URL + '/v1', api_key='none', is_chat_model=True,
               temperature=0, max_tokens=TOKENS)
from llama_index.core.llms import ChatMessage
a = [ChatMessage(role='user', content=ASK)]
print(json.dumps([c.chat(a).message.content, ''.join(p.delta or '' for p in c.stream_chat(a))]))
""",
    ),
    Client(
        "chat",
        "smolagents[openai]",
        """
from smolagents import OpenAIModel
c = OpenAIModel(model_id=MODEL, api_base=URL + '/v1', api_key='none', temperature=0,
                max_tokens=TOKENS)
a = [dict(role='user', content=[dict(type='text', text=ASK)])]
print(json.dumps([c.generate(a).content,
                  ''.join(p.content or '' for p in c.generate_stream(a))]))
""",
    ),
    Client(
        "chat",
        "haystack-ai",
        """
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
c = OpenAIChatGenerator(model=MODEL, api_base_url=URL + '/v1', api_key=Secret.from_token('none'),
                        generation_kwargs=dict(temperature=0, max_tokens=TOKENS))
print(json.dumps([c.run([ChatMessage.from_user(ASK)])['replies'][0].text]))
""",
    ),
    Client(
        "chat",
        "autogen-ext[openai] autogen-agentchat",
        f"""
import asyncio
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
c = OpenAIChatCompletionClient(model=MODEL, {OPENAI}, temperature=0, max_tokens=TOKENS,
    model_info=dict(vision=False, function_calling=True, json_output=True, family='unknown',
                    structured_output=True))
r = asyncio.run(c.create([UserMessage(content=ASK, source='user')]))
print(json.dumps([r.content]))
""",
    ),
    Client(
        "chat",
        "huggingface-hub",
        """
from huggingface_hub import InferenceClient
c = InferenceClient(base_url=URL + '/v1', api_key='none')
a = dict(model=MODEL, messages=[dict(role='user', content=ASK)], temperature=0, max_tokens=TOKENS)
whole = c.chat_completion(**a).choices[0].message.content
parts = [p.choices[0].delta.content or '' for p in c.chat_completion(**a, stream=True)]
print(json.dumps([whole, ''.join(parts)]))
""",
    ),
)
JAVASCRIPT = (
    Client(
        "chat",
        "openai",
        """
import OpenAI from 'openai';
const c = new OpenAI({baseURL: URL + '/v1', apiKey: 'none'});
const a = {model: MODEL, messages: [{role: 'user', content: ASK}], temperature: 0,
           max_tokens: TOKENS};
const whole = (await c.chat.completions.create(a)).choices[0].message.content;
let text = '';
for await (const p of await c.chat.completions.create({...a, stream: true}))
  text += p.choices[0]?.delta?.content ?? '';
console.log(JSON.stringify([whole, text]));
""",
        js=True,
    ),
    Client(
        "messages",
        "@anthropic-ai/sdk",
        """
import Anthropic from '@anthropic-ai/sdk';
const c = new Anthropic({baseURL: URL, apiKey: 'none'});
const a = {model: MODEL, messages: [{role: 'user', content: ASK}], temperature: 0,
           max_tokens: TOKENS};
const whole = (await c.messages.create(a)).content[0].text;
const streamed = await c.messages.stream(a).finalText();
console.log(JSON.stringify([whole, streamed]));
""",
        js=True,
    ),
    Client(
        "ollama",
        "ollama",
        """
import {Ollama} from 'ollama';
const c = new Ollama({host: URL});
const a = {model: MODEL, messages: [{role: 'user', content: ASK}],
           options: {temperature: 0, num_predict: TOKENS}};
const whole = (await c.chat(a)).message.content;
let text = '';
for await (const p of await c.chat({...a, stream: true})) text += p.message.content;
console.log(JSON.stringify([whole, text]));
""",
        js=True,
    ),
    Client(
        "chat",
        "ai @ai-sdk/openai-compatible",
        """
import {generateText, streamText} from 'ai';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
const m = createOpenAICompatible({name: 'ballast', baseURL: URL + '/v1'})(MODEL);
const a = {model: m, prompt: ASK, temperature: 0, maxOutputTokens: TOKENS};
const whole = (await generateText(a)).text;
let text = '';
for await (const p of streamText(a).textStream) text += p;
console.log(JSON.stringify([whole, text]));
""",
        js=True,
    ),
    Client(
        "chat",
        "@langchain/openai @langchain/core",
        """
import {ChatOpenAI} from '@langchain/openai';
const c = new ChatOpenAI({model: MODEL, apiKey: 'none', temperature: 0, maxTokens: TOKENS,
                          configuration: {baseURL: URL + '/v1'}});
let text = '';
for await (const p of await c.stream(ASK)) text += p.content;
console.log(JSON.stringify([(await c.invoke(ASK)).content, text]));
""",
        js=True,
    ),
)


def expected(url: str, model: str) -> str:
    """The text that plain HTTP gets."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": ASK}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def installed(client: Client, directory: Path) -> tuple[list[str], str]:
    """Make an environment; returns the command that runs code in it, and the client's version."""
    if client.js:
        run("npm", "install", "--no-audit", "--no-fund", *client.packages.split(), at=directory)
        manifest = directory / "node_modules" / client.name / "package.json"
        return ["node"], json.loads(manifest.read_text())["version"]
    python = str(directory / "venv" / "bin" / "python")
    if shutil.which("uv"):
        run("uv", "venv", "--quiet", "--python", sys.executable, "venv", at=directory)
        install = ("uv", "pip", "install", "--quiet", "--python", python)
    else:
        run(sys.executable, "-m", "venv", "venv", at=directory)
        install = (python, "-m", "pip", "install", "--quiet")
    run(*install, *client.packages.split(), at=directory)
    asked = f"import importlib.metadata as m; print(m.version({client.name!r}))"
    return [python], run(python, "-c", asked, at=directory).strip()


def run(*command: str, at: Path, seconds: float = INSTALL_SECONDS) -> str:
    """What a command prints. Raises RuntimeError with the end of its errors."""
    apart = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | apart
    done = subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode != 0:
        raise RuntimeError(" ".join((done.stderr or done.stdout).split())[-300:])
    return done.stdout


def tried(client: Client, url: str, model: str, wanted: str) -> tuple[str, str]:
    """The version of a client, and what became of it."""
    with tempfile.TemporaryDirectory() as name:
        directory, version = Path(name), "?"
        values = {"URL": url, "MODEL": model, "ASK": ASK, "TOKENS": TOKENS}
        keyword = "const " if client.js else ""
        head = "".join(f"{keyword}{k} = {json.dumps(v)}\n" for k, v in values.items())
        imports = "" if client.js else "import json\n"
        code = directory / ("try.mjs" if client.js else "try.py")
        code.write_text(imports + head + client.code)
        try:
            command, version = installed(client, directory)
            printed = run(*command, str(code), at=directory, seconds=RUN_SECONDS)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return version, f"failed: {error}"
        texts = json.loads(printed.splitlines()[-1])
        if any(text.strip() != wanted.strip() for text in texts):
            return version, f"other text: {texts}, not {wanted!r}"
        return version, "works" + (", streams" if len(texts) > 1 else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="atlas-chat")
    parser.add_argument("--only", help="names of clients, between commas")
    asked = parser.parse_args()
    clients = (*PYTHON, *(JAVASCRIPT if shutil.which("npm") else ()))
    only = asked.only.split(",") if asked.only else None
    wanted = expected(asked.url, asked.model)
    print("| client | language | version | API | |\n|---|---|---|---|---|", flush=True)
    failed = False
    for client in clients:
        if only is not None and client.name not in only:
            continue
        version, result = tried(client, asked.url, asked.model, wanted)
        failed = failed or not result.startswith("works")
        language = "JavaScript" if client.js else "Python"
        print(f"| `{client.name}` | {language} | {version} | {client.api} | {result} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
