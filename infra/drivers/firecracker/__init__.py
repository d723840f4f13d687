"""Firecracker microVMs as agents: each jailed, with its own address, drives and metadata, found again by its chroot."""

from infra.drivers.firecracker.config import FirecrackerConfig, LabelSet
from infra.drivers.firecracker.driver import FirecrackerDriver

__all__ = ["FirecrackerConfig", "FirecrackerDriver", "LabelSet"]
