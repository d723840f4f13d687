"""Claim codes: how a machine that nobody here started gets a credential."""
