"""Run functions on untrusted files (checkpoints) in child processes with limits.

Packages from `kernels` up may import it; those that read checkpoints or start processes do. It
imports `core` only.

- `calls`: The protocol of calling a function here or in a limited process.
- `limits`: Limits of memory, processor time and time.
- `orphan`: Has the kernel kill a process when its parent ends.
- `zygote`: Calls functions in limited children, forked from one prepared process.
"""
