"""Order the copies through which a model's passes stream content that is not resident.

Pure: no lock, no thread, no clock, no I/O. Packages from `memory` and `policy` up may import it; it
imports `core` alone. Machines, the simulator and groups of ranks drive it, each in its own time.

- `arrival`: Layers that come with one transfer, behind which the first pass runs.
- `buffer`: `Buffer`, the slots of one kind of content, and `LayerCopy`, a copy through them.
- `engine`: `CopyEngine`, the protocol of what makes the copies.
- `stream`: `LayerStream`, the state machine that orders the copies of passes.
"""
