"""The reference agent, and what speaks with agents."""
