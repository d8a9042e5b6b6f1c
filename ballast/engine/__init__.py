"""One device, many models: state, plan, apply, loop. It does not know which world it runs in."""
