"""Implement Anthropic's Messages API: translate its requests to chat requests, write its responses.

`server` alone imports it.

- `form`: Output as a message, whole or as stream events.
- `records`: Response and event records.
- `request`: Request schemas, and their translation to chat requests.
"""
