"""Ollama's API: requests become OpenAI chat and completion requests, answers are lines of JSON.

Imported by the routes only.

- `catalogue`: Models as Ollama's clients list and show them.
- `form`: Writes an answer, whole or as a stream of lines.
- `records`: The API's records.
- `request`: The API's requests, and their translation.
"""
