"""Implement Anthropic's Messages API: translate its requests to chat requests, write its responses.

`server` alone imports it.

- `client_tools`: The tools that a client runs and names by type alone, with their schemas.
- `form`: Output as a message, whole or as stream events.
- `records`: Response and event records.
- `request`: Request schemas, and their translation to chat requests.
"""
