"""The vocabulary: no torch, no zmq, no wall clock, no I/O."""
