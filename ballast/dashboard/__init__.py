"""Show operators what a server does: `ballast top` and `ballast ps`.

The command line may import it. It imports `server`'s records and `core`; it cannot see `bench`.

- `columns`: The table of models.
- `formatting`: Numbers, durations and decisions, formatted in few characters.
- `memory`: Pages by owner, as a bar and in numbers.
- `reader`: Polls a server's state, and derives rates.
- `top`: The display loop, with keys.
- `view`: One frame, as a pure function of what was read.
"""
