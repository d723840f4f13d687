"""The backends a fleet file may name; a new one is one module with its structs and one line here."""

from collections.abc import Mapping

from infra.config.bare_metal import BareMetalScaler
from infra.config.event import EventScaler
from infra.config.firecracker import FirecrackerScaler
from infra.config.scaler import ScalerConfig
from infra.config.scripted import ScriptedScaler

Backends = Mapping[str, type[ScalerConfig]]

BACKENDS: Backends = {"bare-metal": BareMetalScaler, "event": EventScaler, "firecracker": FirecrackerScaler}
"""What operators may use."""

WITH_SCRIPTED: Backends = {**BACKENDS, "scripted": ScriptedScaler}
"""With the backend that only pretends; whoever loads with it has decided to."""
