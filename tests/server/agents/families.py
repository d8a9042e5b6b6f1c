"""Chat templates of model families, written anew and shortened: each takes and refuses what its
model's template does, and raises where that does."""

from __future__ import annotations

ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- if tools %}
  {%- if messages | length == 0 %}
    {{- raise_exception("Cannot put tools in the first user message when there's none!") }}
  {%- endif %}
  {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format ' }}
  {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
  {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
  {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls | length == 1 %}
      {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
    {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
  {%- else %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {%- if message.content is mapping or message.content is iterable %}
      {{- message.content | tojson }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_QWEN_TOOLS = """{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
  {{- "# Tools\\n\\n<tools>" }}
  {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
  {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}" }}
  {{- "\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_TURNS = """
  {%- elif message.role == "assistant" %}
    {{- '<|im_start|>assistant\\n' + message.content }}
    {%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}
      {%- set call = tool_call.function %}
      {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
      {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}
    {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
      {{- '<|im_end|>\\n' }}
    {%- endif %}
"""
_QWEN_END = """
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN3 = (
    _QWEN_TOOLS
    + """{%- for message in messages %}
  {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"""
    + _QWEN_TURNS
    + _QWEN_END
)
"""Leaves out the role `developer` without a word."""
QWEN_LATER = (
    _QWEN_TOOLS
    + """{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
  {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == "system" %}
    {%- if not loop.first %}
      {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
  {%- elif message.role == "user" %}
    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"""
    + _QWEN_TURNS
    + """  {%- else %}{{- raise_exception('Unexpected message role.') }}"""
    + _QWEN_END
)

MISTRAL = """{%- if messages[0]["role"] == "system" %}
  {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
  {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is
      defined and message.tool_calls is not none)) %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
      {{- raise_exception("After the optional system message, conversation roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
  {%- if message["role"] == "user" %}
    {%- if tools is not none and (message == user_messages[-1]) %}
      {{- "[AVAILABLE_TOOLS] [" }}
      {%- for tool in tools %}
        {{- tool | tojson }}{{- ", " if not loop.last else "]" }}
      {%- endfor %}
      {{- "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {%- if loop.first and system_message is defined %}
      {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
    {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- "[TOOL_CALLS] [" }}
    {%- for tool_call in message.tool_calls %}
      {%- set out = tool_call.function | tojson %}
      {{- out[:-1] }}
      {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
    {%- endfor %}
  {%- elif message["role"] == "assistant" %}
    {{- " " + message["content"] | trim + eos_token }}
  {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
    {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
      {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
    {%- endif %}
    {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- else %}
    {{- raise_exception("Only user and assistant roles are supported, with the exception of an "
        "initial optional system message!") }}
  {%- endif %}
{%- endfor %}
"""

GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('" + ALTERNATE + "') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}"
    "{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('" + ALTERNATE + "') }}{%- endif -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"
)

PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Leaves out all other roles without a word."""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Takes whatever role there is."""
HARMONY = """{%- set developer_message = "" %}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
  {%- set developer_message = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start|>system<|message|>You are a model.<|end|>" }}
{%- if developer_message or tools %}
  {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer_message }}
  {%- for tool in tools or [] %}
    {{- "\\ntype " + tool.function.name + " = (_: any) => any;" }}
  {%- endfor %}
  {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- if "tool_calls" in message %}
      {%- set call = message.tool_calls[0].function %}{%- set last.name = call.name %}
      {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
      {{- "<|message|>" }}{{- call.arguments | tojson }}{{- "<|call|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
  {%- elif message.role == 'tool' %}
    {%- if last.name is none %}
      {{- raise_exception("Message has tool role, but there was no previous tool call!") }}
    {%- endif %}
    {{- "<|start|>functions." + last.name + " to=assistant<|message|>" }}
    {{- message.content | tojson }}{{- "<|end|>" }}
  {%- elif message.role == 'user' %}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
"""As of GPT-OSS: a syntax of calls that is not known here, and late system messages are left
out."""

FAMILIES = {
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "qwen, later": QWEN_LATER,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "chatml": CHATML,
    "harmony": HARMONY,
}
