"""Carry messages between the first rank of a tensor-parallel group and each of the others.

- `rank_connections`: Both ends of a connection between two ranks.
- `rank_messages`: Commands of the first rank, and the replies and events of another.
"""
