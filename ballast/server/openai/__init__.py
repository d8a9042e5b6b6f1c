"""Speak OpenAI's completions and chat APIs: their requests, records and answers.

`server` alone imports it; `messages_api` and `responses_api` translate their requests to these.

- `forms`: Answers of the completions and chat APIs, whole or streamed.
- `records`: Response records of the OpenAI API, encoded by msgspec.
- `request`: Schemas of OpenAI's generating requests, with vLLM's extensions.
- `text_request`: Schemas of requests for tokenizing and embeddings.
- `translation`: What other APIs' requests have in common when they become chat requests.
"""
