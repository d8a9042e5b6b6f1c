"""Take a client's request to the devices: check it, encode its prompts, submit it, return its
answer.

Routes call `Service`; it owns the models, keys, quotas and metrics that they share, and reaches the
workers through the controller. It writes no HTTP responses: the routes do, by the form of each API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ballast.cluster.controller import Controller
from ballast.cluster.output_stream import OutputStream
from ballast.core.clock import Clock
from ballast.core.errors import InvalidRequest
from ballast.core.model import SCORE, ModelSpec
from ballast.core.request import Sampling, Submission
from ballast.core.settings import ServerSettings
from ballast.server.access.keys import ApiKeys
from ballast.server.access.meter import RequestMeter, prompt_tokens
from ballast.server.access.queue_pace import QueuePace
from ballast.server.access.quotas import KeyQuotas
from ballast.server.access.whole_answers import WholeAnswers
from ballast.server.generate.answer_size import tokens_that_fit
from ballast.server.generate.choice import Choice, StopConditions
from ballast.server.generate.echo import Echo, EchoedPrompt, echoed_prompts
from ballast.server.generate.embedding import Embedding
from ballast.server.generate.generation import Generation
from ballast.server.generate.output_constraint import OutputConstraint, checks, constraint_of
from ballast.server.generate.parameters import check_fits, most_tokens, sampling_of, stops_of
from ballast.server.http.bodies import MOST_WEIGHT
from ballast.server.http.faults import Fault
from ballast.server.http.fields import Body
from ballast.server.http.refused_fields import refuse_fields
from ballast.server.http.request_context import (
    MOST_SHOWN,
    Caller,
    RequestContext,
    RequestTexts,
)
from ballast.server.model_loads import ModelLoads
from ballast.server.observe.device_metrics import DeviceCollector
from ballast.server.observe.kv_metrics import KvCollector
from ballast.server.observe.memory_history import SAMPLE_SECONDS, MemoryHistory
from ballast.server.observe.metrics import Metrics
from ballast.server.observe.recent_requests import RecentRequests
from ballast.server.openai.request import GenerateRequest
from ballast.server.openai.text_request import EmbeddedTexts
from ballast.server.prompt_encoder import PromptEncoder
from ballast.server.served_models import ServedModels
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TEXTS_PER_TURN = 256
"""Texts to embed that are prepared in one turn of the event loop."""
PROMPT_END = 16
"""Tokens at the end of a prompt that may open the reasoning of its answer."""
_MOST_WARNED, _LONGEST_WARNED = 1000, 80
"""Most names of ignored fields that are remembered as logged, and most characters of each."""


class Service:
    """Generates and embeds for the routes. `clock` measures; `wall` dates answers, in seconds since
    1970."""

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
        self.loads = ModelLoads(clock)
        self.models = ServedModels(controller, tokenizers, self.loads)
        self.prompts = PromptEncoder(templates)
        self.keys = ApiKeys(settings)
        self.quotas = KeyQuotas(clock)
        self.answers = WholeAnswers(lambda: self.settings)
        self._paces: dict[str, QueuePace] = {}
        self.metrics = Metrics(DeviceCollector(controller.devices, wall), clock)
        devices = controller.devices
        self.metrics.registry.register(
            KvCollector(controller.kept_kv.report, lambda: devices.report)
        )
        self.requests = RecentRequests(clock)
        self.history = MemoryHistory()
        self.wall = wall
        self.started = int(wall.now())
        self.clock = clock
        self._grammar_checks = checks()
        self._warned: set[str] = set()

    def configure(self, settings: ServerSettings) -> None:
        """Use other keys, quotas and limits for requests from now on."""
        self.settings = settings
        self.keys.replace(settings)

    async def keep_history(self) -> None:
        """Sample the devices' memory for ever."""
        while True:
            devices = self.controller.devices
            reports = [d.report for d in devices.values() if d.report is not None]
            self.history.add(self.wall.now(), reports, devices.open_requests)
            await asyncio.sleep(SAMPLE_SECONDS)

    @property
    def most_weight(self) -> int:
        """Bound of a request body's weight (`bodies.weight`); the longest prompt of any model
        fits."""
        contexts = (spec.max_model_len for spec in self.controller.devices.specs.values())
        return max(MOST_WEIGHT, 2 * max(contexts, default=0))

    def add_model(self, name: str, tokenizer: Tokenizer) -> None:
        """Serve a model that was added, with this tokenizer."""
        self.models.add(name, tokenizer)
        unreadable = self.controller.devices.unreadable
        self.controller.devices.unreadable = {n: why for n, why in unreadable.items() if n != name}

    def remove_models(self, names: Iterable[str]) -> None:
        """Forget models that were removed, and their adapters."""
        for name in names:
            self.models.remove(name)
            self._paces.pop(name, None)

    async def generate(
        self, request: GenerateRequest, spec: ModelSpec, answer_id: str, context: RequestContext
    ) -> Generation:
        """Submit a request to a model; `answer_id` becomes the answer's id. Raises RequestError,
        Fault or Unavailable."""
        arrived = self.clock.now()
        self.check_fields(request)
        context.request, context.answer_id = request, answer_id
        request.check()
        if not spec.generates:
            uses = "scores pairs of texts (/v1/rerank)"
            if spec.pooling != SCORE:
                uses = "embeds texts (/v1/embeddings)"
            why = f"has no head to generate with; it {uses}"
            raise InvalidRequest(f"the model {spec.name!r} {why}", "model")
        key = context.caller.key
        tokens_that_fit(request, spec, key, [0] * request.prompt_count)
        self._check_queue(spec)
        tokenizer = self.models.tokenizer(spec.name)
        stops = stops_of(request, spec, tokenizer)
        constraint = await constraint_of(request, tokenizer, self._grammar_checks, context)
        sampling = replace(sampling_of(request, spec, stops), grammar=constraint.grammar)
        priority = spec.priority - _priority_offset(request.priority, context.caller)
        prompts = await self.prompts.encode_request(request, spec, tokenizer, context)
        fitting = tokens_that_fit(request, spec, key, [len(prompt) for _, prompt in prompts])
        echoes = await echoed_prompts(request, prompts, tokenizer)
        submissions: list[Submission] = []
        choices: dict[str, Choice] = {}
        for p, (_, prompt) in enumerate(prompts):
            most = most_tokens(request, spec, len(prompt), fitting)
            made = _submissions(
                request, spec, answer_id, p, prompt, most, sampling, stops, priority
            )
            for submission in made:
                choices[submission.id] = _choice(
                    request, len(choices), p, prompt, echoes[p], tokenizer, stops, constraint
                )
            submissions += made
        meter, stream = self._submit(submissions, spec, context.caller, request.cache_salt)
        self.metrics.asked(spec.name, request.choices, request.most_tokens)
        generation = Generation(
            spec.name, choices, stream, meter, arrived, self.clock, self.metrics
        )
        if self.settings.request_texts:
            shown = tokenizer.decode(prompts[0][1][-MOST_SHOWN:])[-MOST_SHOWN:]
            generation.texts = context.texts = RequestTexts(shown)
        context.answer = generation
        return generation

    async def embed(
        self,
        request: EmbeddedTexts,
        answer_id: str,
        context: RequestContext,
        pairs: Callable[[], Sequence[tuple[int, int]]] | None = None,
    ) -> Embedding:
        """Submit texts to be embedded, or, to a cross encoder, `pairs` of them, by their places, to
        be scored; `answer_id` begins the ids of their submissions. Raises RequestError, Fault or
        Unavailable."""
        arrived = self.clock.now()
        context.model = request.model
        spec = await self.models.arrived(request.model, context.caller)
        self.check_fields(request)
        if not spec.embeds:
            raise InvalidRequest(f"the model {spec.name!r} does not embed texts", "model")
        if spec.pooling == SCORE and pairs is None:
            why = "scores pairs of texts (/v1/rerank), and embeds none"
            raise InvalidRequest(f"the model {spec.name!r} {why}", "model")
        request.check(spec.name, spec.hidden)
        priority = spec.priority - _priority_offset(request.priority, context.caller)
        tokenizer = self.models.tokenizer(spec.name)
        if spec.pooling == SCORE and pairs is not None:
            prompts, seconds = await self.prompts.encode_pairs(
                request.texts, pairs(), spec, tokenizer, request.field
            )
        else:
            prompts = await self.prompts.encode_prompts(
                request.texts, spec, tokenizer, request.field
            )
            seconds = [0] * len(prompts)
        submissions = []
        for i, prompt in enumerate(prompts):
            if i % TEXTS_PER_TURN == TEXTS_PER_TURN - 1:
                await asyncio.sleep(0)
            check_fits(spec, len(prompt), 0 if spec.pooling else 1, request.field)
            submissions.append(
                Submission(
                    id=f"{answer_id}-{i}",
                    model=spec.name,
                    prompt=tuple(prompt),
                    max_tokens=0 if spec.pooling else 1,
                    priority=priority,
                    embed=True,
                    second_text=seconds[i],
                )
            )
        meter, stream = self._submit(submissions, spec, context.caller, request.cache_salt)
        embedding = Embedding(
            spec.name, submissions, stream, meter, arrived, self.clock, self.metrics
        )
        embedding.of_pairs = spec.pooling == SCORE
        context.answer = embedding
        return embedding

    def _submit(
        self,
        submissions: Sequence[Submission],
        spec: ModelSpec,
        caller: Caller,
        cache_salt: str | None,
    ) -> tuple[RequestMeter, OutputStream]:
        """Charge submissions to the caller's key and send them to the devices; `cache_salt`: the
        request's own. Raises UnknownModel, Fault or Unavailable."""
        spec = self.models.find(spec.name, caller)  # it may have been removed meanwhile
        queue = spec.base or spec.name
        self.quotas.prompt(caller.key, prompt_tokens(submissions))
        salt = caller.salted(cache_salt)
        if caller.key is not None or salt:
            tenant = "" if caller.key is None else caller.key.name
            submissions = [replace(s, salt=salt, tenant=tenant) for s in submissions]
        stream = self.controller.router.submit(
            submissions,
            caller.name if self.settings.several_keys else "",
            caller.activations_per_minute,
        )
        meter = RequestMeter(
            submissions,
            caller.key,
            self.quotas,
            self._pace(queue),
            lambda: self._waiting(queue),
            self.clock,
        )
        return meter, stream

    def _check_queue(self, spec: ModelSpec) -> None:
        """Raise Fault (429) where the model's queue is full, before anything costly is done."""
        base = self.controller.devices.specs.get(spec.base or spec.name)
        if base is not None and self.controller.devices.full(base):
            self.metrics.failed(spec.name, "queue_full")
            seconds = self._pace(base.name).retry_after(self._waiting(base.name))
            why = f"{base.max_waiting} requests of {base.name!r} wait already"
            raise Fault(429, why, "queue_full", retry_after=seconds)

    def _pace(self, queue: str) -> QueuePace:
        return self._paces.setdefault(queue, QueuePace(self.clock))

    def _waiting(self, model: str) -> int:
        """Count the requests queued for a model, as last reported."""
        report = self.controller.devices.report
        models = () if report is None else report.models
        return sum(m.waiting for m in models if m.name == model)

    def check_fields(self, request: Body) -> None:
        """Log each ignored field once: clients tend to send the same ones every time. Raises
        InvalidRequest for those that must not be ignored."""
        refuse_fields(request)
        for name in (name[:_LONGEST_WARNED] for name in request.ignored):
            if name not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(name)
                log.warning("the request field %r is ignored", name)


def _priority_offset(requested: int | None, caller: Caller) -> int:
    """Return the number to subtract from the model's priority: the request's own `priority`, of
    which, as in vLLM, a smaller one comes earlier. Raises Fault (403) where it is below the least
    that the caller's key may request."""
    key = caller.key
    if requested is None or key is None or requested >= -key.priority:
        return requested or 0
    why = f"priority: {requested} is below {-key.priority}, the least that this key may ask for"
    raise Fault(403, why, "forbidden", "priority")


def _submissions(
    request: GenerateRequest,
    spec: ModelSpec,
    answer_id: str,
    prompt_index: int,
    prompt: Sequence[int],
    most: int,
    sampling: Sampling,
    stops: StopConditions,
    priority: int,
) -> list[Submission]:
    """Build the submissions of one prompt, one for each choice; `most`: output tokens of each."""
    shared = tuple(prompt)  # one object for all choices, sent to the worker once
    return [
        Submission(
            id=f"{answer_id}-{prompt_index * request.choices + choice}",
            model=spec.name,
            prompt=shared,
            max_tokens=most,
            open_ended=request.most_tokens is None or most < request.most_tokens,
            sampling=replace(sampling, choice=choice),
            priority=priority,
            stop_token_ids=(*stops.tokens, *(t for t in stops.eos if t not in spec.eos_token_ids)),
            ignore_eos=bool(request.ignore_eos),
            prompt_logprobs=request.requested_logprobs if request.echoes else None,
        )
        for choice in range(request.choices)
    ]


def _choice(
    request: GenerateRequest,
    index: int,
    prompt_index: int,
    prompt: Sequence[int],
    echoed: EchoedPrompt | None,
    tokenizer: Tokenizer,
    stops: StopConditions,
    constraint: OutputConstraint,
) -> Choice:
    """Build the choice that turns the tokens of one submission into text."""
    return Choice(
        index,
        prompt_index,
        len(prompt),
        tokenizer.detokenizer(
            special=request.skip_special_tokens is False, shown=constraint.shown_tokens(tokenizer)
        ),
        stops,
        parser=constraint.parser(lambda: tokenizer.decode(prompt[-PROMPT_END:])),
        echo=None if echoed is None else Echo(echoed, index),
        silent=request.most_tokens == 0,
    )
