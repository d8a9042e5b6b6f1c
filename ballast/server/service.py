"""From a client's request to submissions: tokenise, check, fill in what was left open."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

from ballast.cluster.controller import Controller
from ballast.core.clock import Clock
from ballast.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from ballast.core.model import ModelSpec
from ballast.core.request import Sampling, Submission
from ballast.server.choice import Choice
from ballast.server.devicemetrics import DeviceCollector
from ballast.server.generation import Generation
from ballast.server.metrics import Metrics
from ballast.server.openai import ChatRequest, CompletionRequest, GenerateRequest, ignored
from ballast.server.stopstrings import StopScanner
from ballast.server.tokenizer import Tokenizer, long_to_tokenize
from ballast.server.watch import current

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as OpenAI's."""


class Service:
    """What the routes call. `clock` measures; `wall` dates answers, in seconds since 1970."""

    def __init__(
        self,
        controller: Controller,
        tokenizers: Mapping[str, Tokenizer],
        clock: Clock,
        wall: Clock,
    ) -> None:
        self.controller = controller
        self.metrics = Metrics(DeviceCollector(controller, wall), clock)
        self.wall = wall
        self.started = int(wall.now())
        self._tokenizers = tokenizers
        self.clock = clock
        self._warned: set[str] = set()

    @property
    def models(self) -> dict[str, ModelSpec]:
        """The models that serve, in the fleet's order, each before its adapters."""
        served = (spec for base in self.controller.specs.values() for spec in base.served)
        return {spec.name: spec for spec in served if spec.name in self._tokenizers}

    def model(self, name: str) -> ModelSpec:
        """Raises UnknownModel, with the reason if the model is of the fleet but not served."""
        spec = self.models.get(name)
        if spec is None:
            why = self.controller.failed.get(name)
            more = f"; it could not be loaded: {why}" if why else ""
            raise UnknownModel(f"the model {name!r} is not served here{more}")
        return spec

    def tokenizer(self, name: str) -> Tokenizer:
        """Of a model that serves."""
        return self._tokenizers[name]

    async def generate(self, request: GenerateRequest, request_id: str) -> Generation:
        """Submit a request. Raises RequestError or Unavailable."""
        arrived = self.clock.now()
        spec = self.model(request.model)
        self._warn(request)
        note = current()
        if note is not None:
            note.request, note.request_id = request, request_id
        prompts = await self._prompts(request, spec)
        sampling = self._sampling(request)
        tokenizer = self._tokenizers[spec.name]
        stops, stop_ids = self._stops(request, tokenizer)
        submissions: list[Submission] = []
        choices: dict[str, Choice] = {}
        for p, prompt in enumerate(prompts):
            most = most_tokens(request, spec, len(prompt))
            for c in range(request.choices):
                index = p * request.choices + c
                submission = Submission(
                    id=f"{request_id}-{index}",
                    model=spec.name,
                    prompt=tuple(prompt),
                    max_tokens=most,
                    open_ended=request.most_tokens is None,
                    sampling=sampling(c),
                    priority=spec.priority,
                    stop_token_ids=stop_ids,
                    ignore_eos=bool(request.ignore_eos),
                )
                submissions.append(submission)
                choices[submission.id] = Choice(
                    index, p, len(prompt), tokenizer.detokenizer(), StopScanner(stops)
                )
        outlet = self.controller.submit(submissions)
        self.metrics.asked(spec.name, request.choices, request.most_tokens)
        return Generation(spec.name, outlet, choices, arrived, self.clock, self.metrics)

    async def _prompts(self, request: GenerateRequest, spec: ModelSpec) -> list[list[int]]:
        tokenizer = self._tokenizers[spec.name]
        if isinstance(request, ChatRequest):
            messages = [m.for_template() for m in request.messages]
            return [await _off_loop(long_to_tokenize(messages), lambda: tokenizer.chat(messages))]
        return [await self._prompt(p, tokenizer, spec) for p in request.prompts]

    @staticmethod
    async def _prompt(prompt: str | list[int], tokenizer: Tokenizer, spec: ModelSpec) -> list[int]:
        if isinstance(prompt, str):
            text = prompt
            tokens = await _off_loop(long_to_tokenize(text), lambda: tokenizer.encode(text))
        else:
            tokens = prompt
            if max(tokens) >= spec.vocab:
                raise InvalidRequest(
                    f"prompt: token id {max(tokens)} is not below {spec.vocab}", "prompt"
                )
        if not tokens:
            raise InvalidRequest("prompt: it is empty", "prompt")
        return tokens

    @staticmethod
    def _sampling(request: GenerateRequest) -> Callable[[int], Sampling]:
        """By index of the choice. A missing seed is drawn once for all choices."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        temperature = 1.0 if request.temperature is None else request.temperature

        def of(choice: int) -> Sampling:
            return Sampling(
                temperature=temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                top_k=max(0, request.top_k or 0),
                seed=seed,
                choice=choice,
                logprobs=0 if request.wants_logprobs else None,
            )

        return of

    @staticmethod
    def _stops(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[list[str], tuple[int, ...]]:
        """Stop strings that are to be found in text, and stop tokens, which have none."""
        strings: list[str] = []
        tokens = list(request.stop_token_ids or ())
        for stop in request.stop or ():
            token = tokenizer.special_token(stop)
            if token is None:
                strings.append(stop)
            else:
                tokens.append(token)
        return strings, tuple(tokens)

    def _warn(self, request: GenerateRequest) -> None:
        """Name ignored fields, each once: clients tend to send the same ones every time."""
        for name in ignored(request):
            if name not in self._warned and len(self._warned) < 1000:
                self._warned.add(name)
                log.warning("the request field %.80r is ignored", name)


def most_tokens(request: GenerateRequest, spec: ModelSpec, prompt_tokens: int) -> int:
    """Bound on the output. Raises ContextLengthExceeded; nothing is ever truncated."""
    left = spec.max_model_len - prompt_tokens
    asked = request.most_tokens
    if left < (asked or 1):
        wanted = f"{prompt_tokens} of the prompt and {asked or 1} to generate"
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ContextLengthExceeded(
            f"the context of {spec.name!r} is {spec.max_model_len} tokens; "
            f"this request needs {prompt_tokens + (asked or 1)}: {wanted}",
            param,
        )
    if asked is not None:
        return asked
    return min(left, COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else left


async def _off_loop(long: bool, work: Callable[[], list[int]]) -> list[int]:
    """The result of `work`, done in another thread if it takes `long`."""
    return await asyncio.to_thread(work) if long else work()
