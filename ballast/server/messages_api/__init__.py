"""Anthropic's Messages API: its requests become chat requests, its answers are written here."""
