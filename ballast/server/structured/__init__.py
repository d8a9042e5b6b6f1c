"""Turn JSON schemas and their like into grammars of llguidance, and check these.

`server` alone imports it, `tools` among it. vLLM calls this structured outputs.

- `grammar_check`: A trial of a grammar in a child process.
- `grammar`: JSON schemas and other constraints as grammars of llguidance.
"""
