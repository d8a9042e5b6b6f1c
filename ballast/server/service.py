"""From a client's request to submissions: tokenise, check, fill in what was left open."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ballast.cluster.controller import Controller
from ballast.core.clock import Clock
from ballast.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import ServerSettings
from ballast.server.access.keys import ApiKeys
from ballast.server.access.meter import Meter, prompt_tokens
from ballast.server.access.queue_pace import QueuePace
from ballast.server.access.quotas import KeyQuotas
from ballast.server.conversation import Conversation
from ballast.server.generate.choice import Choice
from ballast.server.generate.echo import Echo
from ballast.server.generate.embedding import Embedding
from ballast.server.generate.generation import Generation
from ballast.server.generate.output_constraint import checks, constraint_of
from ballast.server.generate.parameters import (
    check_fits,
    check_tokens,
    most_tokens,
    sampling_of,
    stops_of,
)
from ballast.server.http import request_context
from ballast.server.http.bodies import MOST_WEIGHT
from ballast.server.http.faults import Fault
from ballast.server.http.fields import Body
from ballast.server.http.off_loop import large_body, off_loop
from ballast.server.observe.device_metrics import DeviceCollector
from ballast.server.observe.metrics import Metrics
from ballast.server.openai.request import ChatRequest, CompletionRequest, GenerateRequest
from ballast.server.openai.text_request import EmbeddingRequest
from ballast.server.text.chat_template import TemplateJob, TemplateRenderer
from ballast.server.text.tokenizer import HUGE_TEXT, LONG_TEXT, Tokenizer, TooManyTokens

log = logging.getLogger(__name__)

_NAME = 200
"""Characters of an unknown model's name that an error repeats."""
_NAMED = 20
"""Models that an error names; `GET /v1/models` names all."""


class Service:
    """What the routes call. `clock` measures; `wall` dates answers, in seconds since 1970."""

    def __init__(
        self,
        controller: Controller,
        tokenizers: Mapping[str, Tokenizer],
        clock: Clock,
        wall: Clock,
        settings: ServerSettings,
        templates: TemplateRenderer,
    ) -> None:
        self.controller = controller
        self.templates = templates
        self.settings = settings
        self.keys = ApiKeys(settings)
        self.quotas = KeyQuotas(clock)
        self._paces: dict[str, QueuePace] = {}
        self.metrics = Metrics(DeviceCollector(controller, wall), clock)
        self.wall = wall
        self.started = int(wall.now())
        self._tokenizers = dict(tokenizers)
        self.clock = clock
        self._checking = checks()
        self._warned: set[str] = set()

    def configure(self, settings: ServerSettings) -> None:
        """Other keys, quotas and limits, for requests from now on."""
        self.settings = settings
        self.keys.replace(settings)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """The models that serve and that the caller may use, in the fleet's order, each before
        its adapters."""
        served = (spec for base in self.controller.specs.values() for spec in base.served)
        return {s.name: s for s in served if s.name in self._tokenizers and self._may_use(s.name)}

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of the fleet's models and adapters, each with the own name that it
        stands for."""
        return {a: name for name, known in self.controller.fleet.aliases.items() for a in known}

    def _may_use(self, name: str) -> bool:
        """Whether the caller's key, which may list own names and aliases, is for this model."""
        may_use = request_context.current().caller.may_use
        return may_use(name) or any(map(may_use, self.controller.fleet.aliases.get(name, ())))

    @property
    def most_weight(self) -> int:
        """Of a request's body (`bodies.weight`): whatever its model, its longest prompt fits."""
        contexts = (spec.max_model_len for spec in self.controller.specs.values())
        return max(MOST_WEIGHT, 2 * max(contexts, default=0))

    @property
    def failed(self) -> dict[str, str]:
        """The fleet's models that do not serve, with the reason; those that the caller may use."""
        return {name: why for name, why in self.controller.failed.items() if self._may_use(name)}

    def own_name(self, name: str) -> str:
        """The own name of the model that a client asks for by its own name or by an alias."""
        known = name in self._tokenizers or name in self.controller.failed
        return name if known else self.aliases.get(name, name)

    def model(self, name: str) -> ModelSpec:
        """The model of that name or alias. Raises UnknownModel: with the reason if the model is of
        the fleet but not served, and the models that the caller may use."""
        models, own = self.models, self.own_name(name)
        spec = models.get(own)
        if spec is None:
            why = self.failed.get(own)
            more = f": it could not be loaded ({why})" if why else ""
            shown = f"{name[:_NAME]!r}" if len(name) <= _NAME else f"{name[:_NAME]!r}..."
            raise UnknownModel(f"the model {shown} is not served here{more}; {_served(models)}")
        return spec

    def tokenizer(self, name: str) -> Tokenizer:
        """Of a model that serves. Raises UnknownModel: it may have been removed meanwhile."""
        if name not in self._tokenizers:
            raise UnknownModel(f"the model {name!r} is not served here any more")
        return self._tokenizers[name]

    def learn(self, name: str, tokenizer: Tokenizer) -> None:
        """A model that was added serves from now on, with this tokenizer."""
        self._tokenizers[name] = tokenizer
        unreadable = self.controller.unreadable
        self.controller.unreadable = {n: why for n, why in unreadable.items() if n != name}

    def forget(self, names: Iterable[str]) -> None:
        """Models that were removed, and their adapters."""
        for name in names:
            self._tokenizers.pop(name, None)
            self._paces.pop(name, None)

    async def generate(
        self, request: GenerateRequest, spec: ModelSpec, request_id: str
    ) -> Generation:
        """Submit a request to a model. Raises RequestError or Unavailable."""
        arrived = self.clock.now()
        self.warn(request)
        made = request_context.current()
        made.request, made.answer_id = request, request_id
        request.check()
        self._check_queue(spec)
        tokenizer = self.tokenizer(spec.name)
        stops = stops_of(request, spec, tokenizer)
        constraint = await constraint_of(request, tokenizer, self._checking)
        sampling = replace(sampling_of(request, spec, stops), grammar=constraint.grammar)
        priority = self._priority(request.priority)
        prompts = await self._prompts(request, spec)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        submissions: list[Submission] = []
        choices: dict[str, Choice] = {}
        for p, (text, prompt) in enumerate(prompts):
            shared = tuple(prompt)  # one object, which crosses to the worker once
            most = most_tokens(request, spec, len(prompt))
            for c in range(request.choices):
                index = p * request.choices + c
                submission = Submission(
                    id=f"{request_id}-{index}",
                    model=spec.name,
                    prompt=shared,
                    max_tokens=most,
                    open_ended=request.most_tokens is None or most < request.most_tokens,
                    sampling=replace(sampling, choice=c),
                    priority=spec.priority - priority,
                    stop_token_ids=stops.tokens,
                    ignore_eos=bool(request.ignore_eos),
                    prompt_logprobs=request.told_logprobs if echo else None,
                )
                submissions.append(submission)
                scored = submission.prompt_logprobs is not None
                shows_special = request.skip_special_tokens is False
                choices[submission.id] = Choice(
                    index,
                    p,
                    len(prompt),
                    tokenizer.detokenizer(
                        special=shows_special, markers=constraint.tools is not None
                    ),
                    stops,
                    calls=constraint.parser(),
                    echo=Echo(text, prompt, tokenizer.detokenizer(), scored=scored)
                    if echo
                    else None,
                    silent=request.most_tokens == 0,
                )
        stream = self._submit(submissions)
        self.metrics.asked(spec.name, request.choices, request.most_tokens)
        return Generation(spec.name, stream, choices, arrived, self.clock, self.metrics)

    async def embed(self, request: EmbeddingRequest, request_id: str) -> Embedding:
        """Submit texts to be embedded. Raises RequestError or Unavailable."""
        arrived = self.clock.now()
        spec = self.model(request.model)
        self.warn(request)
        if not spec.embeds:
            raise InvalidRequest(f"the model {spec.name!r} does not embed texts", "model")
        if request.dimensions not in (None, spec.hidden):
            raise InvalidRequest(
                f"dimensions: embeddings of {spec.name!r} have {spec.hidden}", "dimensions"
            )
        priority = self._priority(request.priority)
        prompts = await self.tokens(request.texts, spec, "input")
        submissions = []
        for i, prompt in enumerate(prompts):
            check_fits(spec, len(prompt), 1, "input")
            submissions.append(
                Submission(
                    id=f"{request_id}-{i}",
                    model=spec.name,
                    prompt=tuple(prompt),
                    max_tokens=1,
                    priority=spec.priority - priority,
                    embed=True,
                )
            )
        stream = self._submit(submissions)
        return Embedding(spec.name, stream, submissions, arrived, self.clock, self.metrics)

    def _submit(self, submissions: Sequence[Submission]) -> Meter:
        """Charge them to the caller's key and send them off. Raises Fault or Unavailable."""
        made = request_context.current()
        caller = made.caller
        name = submissions[0].model
        queue = self.model(name).base or name
        self.quotas.prompt(caller.key, prompt_tokens(submissions))
        if caller.key is not None:
            key = caller.key.name
            submissions = [replace(s, salt=caller.salt, tenant=key) for s in submissions]
        meter = Meter(
            self.controller.submit(submissions, caller.name if self.settings.several_keys else ""),
            submissions,
            caller.key,
            self.quotas,
            self._pace(queue),
            lambda: self._waiting(queue),
            self.clock,
        )
        made.meter = meter
        return meter

    def _priority(self, wanted: int | None) -> int:
        """What a request may take off its model's priority. Raises Fault (403) where it is less
        than its key may: a smaller number comes earlier."""
        key = request_context.current().caller.key
        if wanted is None or key is None or wanted >= -key.priority:
            return wanted or 0
        why = f"priority: {wanted} is below {-key.priority}, the least that this key may ask for"
        raise Fault(403, why, "forbidden", "priority")

    def _check_queue(self, spec: ModelSpec) -> None:
        """Raises Fault (429) where the model's queue is full: before anything costly is done."""
        base = self.controller.specs.get(spec.base or spec.name)
        if base is not None and self.controller.full(base):
            self.metrics.failed(spec.name, "queue_full")
            seconds = self._pace(base.name).retry_after(self._waiting(base.name))
            why = f"{base.max_waiting} requests of {base.name!r} wait already"
            raise Fault(429, why, "queue_full", retry_after=seconds)

    def _pace(self, queue: str) -> QueuePace:
        return self._paces.setdefault(queue, QueuePace(self.clock))

    def _waiting(self, model: str) -> int:
        """Requests queued for a model, as last reported."""
        report = self.controller.report
        models = () if report is None else report.models
        return sum(m.waiting for m in models if m.name == model)

    async def tokens(
        self, prompts: Sequence[str | list[int]], spec: ModelSpec, field: str
    ) -> list[list[int]]:
        """Token ids of prompts: at least one each, all of the vocabulary. Raises InvalidRequest,
        and ContextLengthExceeded."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self.encoded(texts, spec, field, special=True))
        tokens = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        for prompt, ids in zip(prompts, tokens, strict=True):
            if not isinstance(prompt, str):
                check_tokens(ids, spec, field)
            if not ids:
                raise InvalidRequest(f"{field}: it is empty", field)
        return tokens

    async def encoded(
        self, texts: Sequence[str], spec: ModelSpec, field: str, *, special: bool
    ) -> list[list[int]]:
        """Token ids of texts; `special`: with what the tokenizer puts around a text. Raises
        ContextLengthExceeded, where it can before tokenizing."""
        tokenizer, most = self.tokenizer(spec.name), spec.max_model_len

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, special=special, most=most) for text in texts]

        try:
            size = sum(map(len, texts))
            return await off_loop(size > LONG_TEXT, encode, huge=size > HUGE_TEXT)
        except TooManyTokens as error:
            found = "more" if error.found is None else error.found
            why = f"{found} tokens in {error.characters} characters"
            raise ContextLengthExceeded(
                f"{field}: the context of {spec.name!r} is {most} tokens; there are {why}", field
            ) from None

    async def conversation(self, request: Conversation, spec: ModelSpec) -> list[int]:
        """Token ids of a conversation as the model reads it. Raises InvalidRequest,
        ContextLengthExceeded, and Unavailable."""
        tokenizer = self.tokenizer(spec.name)

        def prepare() -> TemplateJob:
            messages = [m.for_template() for m in request.messages or ()]
            tools = request.shown_tools
            if tokenizer.dialect is not None:
                messages = tokenizer.dialect.conversation(messages, tools)
            return tokenizer.conversation(
                messages,
                tools=tools,
                answer=request.add_generation_prompt is not False,
                continued=bool(request.continue_final_message),
                more=request.chat_template_kwargs,
            )

        text = await self.templates.render(await off_loop(large_body(), prepare))
        special = bool(request.add_special_tokens)
        [tokens] = await self.encoded([text], spec, "messages", special=special)
        if not tokens:
            raise InvalidRequest("messages: the chat template makes nothing of them", "messages")
        return tokens

    async def _prompts(
        self, request: GenerateRequest, spec: ModelSpec
    ) -> list[tuple[str | None, list[int]]]:
        """Each as text, where the client wrote text, and as tokens."""
        if isinstance(request, ChatRequest):
            return [(None, await self.conversation(request, spec))]
        prompts = request.prompts
        tokens = await self.tokens(prompts, spec, "prompt")
        texts = (prompt if isinstance(prompt, str) else None for prompt in prompts)
        return list(zip(texts, tokens, strict=True))

    def warn(self, request: Body) -> None:
        """Name ignored fields, each once: clients tend to send the same ones every time."""
        for name in request.ignored:
            if name not in self._warned and len(self._warned) < 1000:
                self._warned.add(name)
                log.warning("the request field %.80r is ignored", name)


def _served(models: Iterable[str]) -> str:
    """What can be asked for instead of a model that there is not."""
    names = list(models)
    if not names:
        return "no model is served to this key"
    more = f" and {len(names) - _NAMED} more (GET /v1/models)" if len(names) > _NAMED else ""
    return f"served: {', '.join(names[:_NAMED])}{more}"
