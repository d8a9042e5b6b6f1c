"""Generate answers: from a request's fields to sampling parameters, and from tokens to text.

`server` alone imports it.

- `answer`: The answer to one request: reads its output stream, counts and times it.
- `choice`: One choice of an answer: tokens turned into text as they come.
- `echo`: A prompt repeated in its answer, with its log-probabilities.
- `embedding`: Embeddings of one client's request.
- `generation`: All choices of one client's request.
- `output_constraint`: Constraints of an answer: tool calls, or a grammar.
- `parameters`: Sampling parameters and stop conditions of a request.
"""
