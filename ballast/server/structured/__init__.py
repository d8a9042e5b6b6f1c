"""Convert JSON schemas, regular expressions and the like to llguidance grammars, and test these.

`server` alone imports it, also in `tools`. vLLM calls this structured outputs.

- `grammar_check`: Tests a grammar in a child process.
- `grammar`: JSON schemas and other constraints as grammars of llguidance.
"""
