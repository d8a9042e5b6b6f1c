"""Define the tool-call syntax of each model family: the markers around calls, and the form of a
call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

NAME, ARGUMENTS = "\0name\0", "\0arguments\0"
"""Placeholders for a function's name and its arguments in `Syntax.call`."""

_WORD = r"(?P<name>[a-zA-Z0-9_.:/-]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """The syntax of tool calls: how to parse them, and how to write them in an enforcing
    grammar."""

    opens: tuple[str, ...] = ()
    """Markers that a call, or a list of calls, follows."""
    bare: str = ""
    """Characters that begin calls without a marker, where they are the first of an output."""
    closes: tuple[str, ...] = ()
    """Texts that may stand after a call, and are skipped."""
    header: re.Pattern[str] | None = None
    """Pattern of the text between marker and arguments, where calls are not JSON objects."""
    python: bool = False
    """Whether calls are written in Python."""

    begin: str = ""
    call: str
    between: str
    end: str = ""
    """For enforced calls: the text before all calls, one call, the text between two, and after
    all."""

    call_id: str = "call_"
    """Prefix of call ids; empty: ids are the nine letters and digits that Mistral's templates
    need."""
    text_arguments: bool = False
    """Whether the chat template expects arguments as JSON text, not as an object."""
    tools_in_system: bool = False
    """Whether the chat template reads the tools from the system message."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the tokenizer may have as single tokens."""
        written = (*self.opens, *self.closes, self.begin, self.call, self.end)
        found = (m for text in written for m in MARKER.findall(text))
        return tuple(dict.fromkeys(found))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls, each a function's name and its arguments as JSON."""
        made = (
            self.call.replace(NAME, name).replace(
                ARGUMENTS, _keywords(arguments) if self.python else arguments
            )
            for name, arguments in calls
        )
        return f"{self.begin}{self.between.join(made)}{self.end}"


def _keywords(arguments: str) -> str:
    """Write a JSON object as Python's keyword arguments; other JSON stays as it is."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(values, dict):
        return arguments
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


MARKER = re.compile(
    r"<\|[\w/]+\|>|<\uff5c[\w\u2581]+\uff5c>|</?tool_call>|\[(?:TOOL_CALLS|ARGS|CALL_ID)\]"
)

_MISTRAL_HEADER = re.compile(rf"\s*{_WORD}\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'

_DEEPSEEK_CALLS, _DEEPSEEK_CALL, _DEEPSEEK_SEP = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("calls\u2581begin", "call\u2581begin", "sep")
)
_DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END = (
    f"<\uff5ctool\u2581{word}\u2581end\uff5c>" for word in ("call", "calls")
)
_DEEPSEEK_OPENS = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL)
_DEEPSEEK_HEADER = re.compile(
    rf"(?:\s*{_DEEPSEEK_CALL})?\s*(?:function{_DEEPSEEK_SEP})?{_WORD}"
    rf"(?:{_DEEPSEEK_SEP})?\s*(?:```json)?\s*"
)

SYNTAXES: dict[str, Syntax] = {
    # NousResearch's Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, SmolLM 3.
    "hermes": Syntax(
        opens=("<tool_call>",),
        closes=("</tool_call>",),
        call=f"<tool_call>\n{_OBJECT}\n</tool_call>",
        between="\n",
    ),
    # Llama 3.1 to 3.3, and Llama 4 with its JSON templates.
    "llama3": Syntax(
        opens=("<|python_tag|>",),
        bare="{[",
        closes=(";", ","),
        call=f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}',
        between="; ",
    ),
    # Mistral 7B 0.3, Nemo, Small 3: a list of objects.
    "mistral": Syntax(
        opens=("[TOOL_CALLS]",),
        header=_MISTRAL_HEADER,
        begin="[TOOL_CALLS][",
        call=_OBJECT,
        between=", ",
        end="]",
        call_id="",
    ),
    # Mistral Small 3.2, Magistral, Devstral: name and arguments.
    "mistral-args": Syntax(
        opens=("[TOOL_CALLS]",),
        header=_MISTRAL_HEADER,
        call=f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
        between="",
        call_id="",
    ),
    # Granite 3.
    "granite": Syntax(
        opens=("<|tool_call|>", "<tool_call>"),
        closes=("</tool_call>",),
        begin="<|tool_call|>[",
        call=_OBJECT,
        between=", ",
        end="]",
    ),
    "phi4-mini": Syntax(
        opens=("<|tool_call|>", "functools"),
        closes=("<|/tool_call|>",),
        begin="<|tool_call|>[",
        call=_OBJECT,
        between=", ",
        end="]<|/tool_call|>",
        tools_in_system=True,
    ),
    # DeepSeek V3 and R1.
    "deepseek-v3": Syntax(
        opens=_DEEPSEEK_OPENS,
        closes=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
        header=_DEEPSEEK_HEADER,
        begin=_DEEPSEEK_CALLS,
        call=(
            f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}{NAME}\n"
            f"```json\n{ARGUMENTS}\n```{_DEEPSEEK_CALL_END}"
        ),
        between="\n",
        end=_DEEPSEEK_CALLS_END,
    ),
    "deepseek-v3.1": Syntax(
        opens=_DEEPSEEK_OPENS,
        closes=(_DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
        header=_DEEPSEEK_HEADER,
        begin=_DEEPSEEK_CALLS,
        call=f"{_DEEPSEEK_CALL}{NAME}{_DEEPSEEK_SEP}{ARGUMENTS}{_DEEPSEEK_CALL_END}",
        between="",
        end=_DEEPSEEK_CALLS_END,
        text_arguments=True,
    ),
    # Llama 4, and Llama 3.2 with a template that uses this syntax.
    "pythonic": Syntax(
        opens=("<|python_start|>",),
        bare="[",
        closes=("<|python_end|>",),
        python=True,
        begin="[",
        call=f"{NAME}({ARGUMENTS})",
        between=", ",
        end="]",
    ),
}


def recognised(template: str) -> str | None:
    """Return the name of the dialect that a chat template uses; None: no tools, or an unknown
    syntax.

    Templates show how a call is written, or repeat earlier ones: dialects are recognised by that.
    """
    if not re.search(r"\btools\b", template):
        return None
    if _DEEPSEEK_CALL in template:
        return "deepseek-v3" if "```json" in template else "deepseek-v3.1"
    if "[TOOL_CALLS]" in template:
        return "mistral-args" if "[ARGS]" in template else "mistral"
    if "<|tool|>" in template or "functools" in template:
        return "phi4-mini"
    if "<|tool_call|>" in template:
        return "granite"
    if "<tool_call>" in template:
        # Qwen 3 Coder and GLM write arguments as XML between the same markers.
        return None if re.search("<function=|<arg_key>", template) else "hermes"
    if re.search(r"\[func(tion)?_?name\d*\(|<\|python_start\|>", template):
        return "pythonic"
    if "<|python_tag|>" in template or re.search(r'"parameters\\?": ', template):
        return "llama3"
    return None
