"""Serve one device with a group of processes, its tensor-parallel ranks.

A *rank* is one process of the group and has an equal part of each model, of the memory and of the
link. The first rank is the device's worker: it has the loop, the pool and the policies, and holds
the group together as one machine. Each further rank is a process that decides nothing and carries
out the first one's commands. A group that loses a rank ends as a whole.

::

    first rank (the worker)                          each further rank
    GroupMachine ─ RankMachine 0                     RankServer ─ RankMachine 1, 2, ..
        RemoteRank  ── memory, models, jobs ──────────>
                    <── events ────────────────────────

- `group_machine`: The group as one machine, in the first rank.
- `group_stream`: Rotating layers of a model of a group, in the first rank.
- `rank_machine`: The memory, link and models of one rank, and its share of the settings.
- `rank_process`: The process of a further rank.
- `rank_server`: A further rank's state, and the first rank's commands on it.
- `remote_rank`: The first rank's handle of a further rank: its process and connections.
- `remote_vm`: The first rank's proxy of a further rank's virtual memory.
"""
