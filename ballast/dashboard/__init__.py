"""What operators look at, over what a server tells of itself."""
