"""Firecracker microVMs as agents: each jailed, with its own address, drives and metadata, found again by its chroot."""
