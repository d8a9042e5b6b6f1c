"""Virtual time: the same engine loop and policies, with a clock that jumps and jobs that cost."""
