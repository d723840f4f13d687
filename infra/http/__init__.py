"""What the coordinator serves over HTTP."""
