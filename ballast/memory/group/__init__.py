"""Present the memory of a tensor-parallel group as one device's: all ranks do the same.

- `link`: The link of a group: a transfer has landed when all ranks have their parts.
- `vm`: `Vm` of a group: one page is one page on every rank.
"""
