"""Turn text into tokens and back: tokenizers, chat templates, detokenization, stop strings.

`server` alone imports it. Templates run in child processes, since anybody may have written them.

- `chat_template_child`: The process that renders them.
- `chat_template`: Chat templates, rendered in processes that can be killed.
- `detokenize`: Incremental detokenization, never within a character.
- `output_blocks`: One choice's output grouped into runs of text and calls of functions.
- `pieces`: Pieces of output: text, tokens with log-probabilities, ends.
- `stop_strings`: Stop strings in streamed text.
- `text_bound`: An upper bound of tokens by characters, to refuse long texts early.
- `tokenizer`: A model's tokenizer and chat template.
"""
