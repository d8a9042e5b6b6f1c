"""OpenAI's Responses API: its requests become chat requests, its answers are written here."""
