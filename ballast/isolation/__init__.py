"""Run functions on untrusted files in child processes with limits.

Packages from `kernels` up may import it; those that read checkpoints or grammars do. It imports
`core` only.

- `calls`: The protocol of calling a function here or in a limited process.
- `limits`: Limits of memory, processor time and time.
- `orphan`: End a process when its parent ends.
- `zygote`: A process that forks one limited child for each call.
"""
