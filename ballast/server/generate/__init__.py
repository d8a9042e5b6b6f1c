"""Generate answers: from a request's fields to sampling parameters, and from tokens to text.

`server` alone imports it.

- `answer`: Reads the output stream of one request, with times and counts.
- `answer_size`: Bounds the values of one answer.
- `choice`: Turns the tokens of one choice into text as they arrive.
- `echo`: Repeats the prompt in the answer, with its log-probabilities.
- `embedding`: Collects the embeddings of one client's request.
- `generation`: Collects all choices of one client's request.
- `output_constraint`: Derives an output's constraint: tool calls, or a grammar.
- `output_parser`: Divides an output into reasoning, content and tool calls.
- `parameters`: Converts a request's fields to sampling parameters and stop conditions.
"""
