"""Child processes with limits, for work on files that nobody vouches for."""
