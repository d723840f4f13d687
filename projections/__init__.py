"""What the facts add up to: pure folds from state and event to state."""
