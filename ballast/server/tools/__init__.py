"""Parse and enforce tool calls in the syntax of each model family.

`server` alone imports it.

- `delta`: Parsed output: text, or the beginning or arguments of a tool call.
- `dialect`: The syntax of one model's calls, recognised by its chat template.
- `enforced`: Grammars that force a call in the model's syntax.
- `json_calls`: Calls written as JSON.
- `parser`: Streaming parser of output into text and calls.
- `python_calls`: Calls written as Python.
- `reader`: Reads characters, holding back text that may still become a call.
- `request`: Validates a request's fields for tools.
- `syntax`: The table of call syntaxes by model family.
"""
