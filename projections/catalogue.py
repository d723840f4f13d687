"""Every read model there is; each has its own checkpoint and stops alone."""

from projections.fleet import FleetView
from projections.timeline import TimelineView
from projections.view import View

FLEET = FleetView()
TIMELINE = TimelineView()

VIEWS: tuple[View, ...] = (FLEET, TIMELINE)
