"""Host processes as agents: each in a process group and, where one can be made, a cgroup of its own."""

from infra.drivers.bare_metal.config import BareMetalConfig, LabelSet
from infra.drivers.bare_metal.driver import BareMetalDriver

__all__ = ["BareMetalConfig", "BareMetalDriver", "LabelSet"]
