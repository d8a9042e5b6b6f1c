"""Run functions on untrusted files (checkpoints) in child processes with limits.

Packages from `kernels` up may import it; those that read checkpoints or start processes do. It
imports `core` only.

- `calls`: The protocol of calling a function here or in a limited process.
- `confinement`: Takes from a process what reading data does not need.
- `environment`: Chooses the environment variables that child processes get.
- `hangup`: Notes SIGHUP while a server starts, whose default would end it.
- `limits`: Limits of memory, processor time and time.
- `orphan`: Has the kernel kill a process when its parent ends.
- `syscall_filter`: The system calls that are denied, as a seccomp filter.
- `zygote`: Calls functions in limited children, forked from one prepared process.
"""
