"""Speak OpenAI's Responses API: its requests become chat requests, its answers are written here.

`server` alone imports it.

- `form`: Output as a response, whole or as stream events.
- `records`: Response and event records.
- `request`: Request schemas, and their translation to chat requests.
"""
