"""Memory of a tensor-parallel group as that of one device: what is done is done on every rank.

- `link`: The link of a group: a transfer has landed when all ranks have their parts.
- `vm`: `Vm` of a group: one page is one page on every rank.
"""
