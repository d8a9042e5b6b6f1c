"""Turn text into tokens and back: tokenizers, chat templates, detokenization, stop strings.

`server` alone imports it. Templates run in child processes, since a checkpoint's author may have
written anything.

- `chat_template_child`: The process whose children render chat templates.
- `chat_template`: Renders chat templates in processes that can be killed.
- `detokenize`: Incremental detokenization, never within a character.
- `model_template`: A tokenizer's chat template: jobs that render it, and what it takes.
- `output_blocks`: Groups one choice's output into runs of text, reasoning and tool calls.
- `pieces`: Pieces of output: text, tokens with log-probabilities, ends.
- `reasoning`: Divides output into reasoning and answer.
- `stop_strings`: Stop strings in streamed text.
- `template_messages`: Messages between the server and what renders its templates.
- `template_traits`: Finds out which forms of conversation a chat template takes.
- `template_check`: Check at the start that tokenizer and chat template fit the model.
- `text_bound`: An upper bound of tokens by characters, to refuse long texts early.
- `tokenizer`: A model's tokenizer.
- `turns`: Rewrites conversations in the forms that a chat template takes.
"""
