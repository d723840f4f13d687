"""A tiny guest of our own for Firecracker, what it needs to run, and the place where tests boot it."""
