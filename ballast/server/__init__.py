"""HTTP in front of a worker: text in, token ids to the worker, text out."""
