"""Show operators the state of a running server: `ballast top` and `ballast ps`.

The command line may import it. It imports `server`'s records and `core`, never `bench`. It only
reads: it polls `/admin/state` over HTTP, and changes nothing.

- `columns`: The table of models, one row for each model and adapter.
- `formatting`: Short texts for numbers, durations and decisions.
- `memory`: Pages by owner, as a bar and in numbers.
- `reader`: Polls a server's state, and derives rates.
- `top`: The commands: the display loop with its keys, one frame, or JSON lines.
- `view`: Draws one frame, as a pure function of the readings.
"""
