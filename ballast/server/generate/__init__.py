"""Generate answers: from a request's fields to sampling, and from tokens to pieces of output.

`server` alone imports it.

- `choice`: One choice of an answer: tokens turned into text as they come.
- `echo`: A prompt repeated in its answer, with its log-probabilities.
- `embedding`: Embeddings of one client's request.
- `generation`: All choices of one client's request.
- `output_blocks`: One choice's output grouped into runs of text and calls of functions.
- `output_constraint`: Constraints of an answer: tool calls, or a grammar.
- `parameters`: Sampling parameters and stop conditions of a request.
- `pieces`: Pieces of output: text, tokens with log-probabilities, ends.
- `routes`: Routes that generate, whole or streamed.
- `text_routes`: Routes for tokenizing and embeddings.
"""
