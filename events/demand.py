"""What has happened to one demand: somebody asked for agents."""

from events.envelope import Event


class Placed(Event, frozen=True, kw_only=True, tag="demand.placed"):
    """The demand got these machines, in the same batch. A second demand for the same job finds this fact."""

    labels: tuple[str, ...]
    vms: tuple[str, ...]
    job: str | None = None
    run: str | None = None


DemandEvent = Placed
