"""A tokenizer's chat template: what renders a conversation, and which forms of it that takes."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.core.errors import InvalidRequest
from ballast.server.text.chat_template import (
    TemplateBroken,
    TemplateRenderer,
    TemplateTooCostly,
)
from ballast.server.text.template_messages import EncodedJob, TemplateJob
from ballast.server.text.template_traits import TemplateTraits, probed
from ballast.server.tools.dialect import ToolDialect

log = logging.getLogger(__name__)

PROBE_SECONDS = 120.0
"""Seconds in which the forms that a template takes must be found out; most take 0.05."""
_SAMPLE_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
]


class ChatTemplate:
    """The chat template of one tokenizer of `transformers`, or of several by name."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.fault = ""
        """Reason why the template is not used; empty where it is."""
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        """Names that variables of a template cannot have: they are parameters of
        `apply_chat_template`."""

    @property
    def text(self) -> str:
        """The template of conversations without tools; empty if there is none."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):  # templates by name
            template = template.get("default")
        return str(template or "")

    @property
    def with_tools(self) -> str:
        """The template of requests with tools."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping) and "tool_use" in template:
            return str(template["tool_use"])
        return self.text

    def job(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
        continued: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> EncodedJob:
        """Build the job that renders a conversation; `more`: variables of the template.

        With `answer` the text ends where the answer begins; if `continued`, at the end of the last
        message, which the answer continues. Raises InvalidRequest if there is no chat template.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        if self.fault:
            raise InvalidRequest(self.fault, "messages")
        reserved = self._reserved.intersection(more or ())
        if reserved:
            named = ", ".join(sorted(reserved))
            raise InvalidRequest(
                f"chat_template_kwargs: {named} cannot be set so", "chat_template_kwargs"
            )
        try:
            template = self._tokenizer.get_chat_template(None, tools or None)
        except ValueError as error:  # several templates, none of them a default
            raise InvalidRequest(f"this model's chat templates: {error}", "messages") from error
        return TemplateJob(
            template=template,
            messages=list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=answer and not continued,
            continue_final_message=continued,
            variables={**self._tokenizer.special_tokens_map, **(more or {})},
        ).encoded()

    async def traits(
        self, renderer: TemplateRenderer, dialect: ToolDialect | None, *, tools: bool
    ) -> TemplateTraits:
        """Return the forms of conversation that the template takes, with or without `tools`; tried
        when first asked for. `dialect`: of the model's tool calls.

        Raises TemplateTooCostly, TemplateBroken and Unavailable."""
        shown = _SAMPLE_TOOLS if tools and dialect is not None and not dialect.described else None
        native = dialect is not None and not dialect.described
        name = dialect.name if dialect is not None and native else ""
        key = (self.text, self.with_tools, name, shown is None)
        found = renderer.traits.get(key)
        if found is None:

            async def render(turns: Sequence[Mapping[str, Any]]) -> str | None:
                messages = turns if dialect is None else dialect.conversation(turns, shown)
                try:
                    return await renderer.render(self.job(messages, tools=shown))
                except (TemplateTooCostly, TemplateBroken):
                    raise
                except InvalidRequest:
                    return None

            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    found = await probed(render, self.with_tools, calls=native)
            except TimeoutError:
                log.warning("a chat template is too slow to be tried; it gets all as it is sent")
                found = TemplateTraits()
            renderer.traits[key] = found
        return found
