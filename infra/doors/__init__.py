"""What the front doors share: how they hear and answer, and the threads they work on."""
