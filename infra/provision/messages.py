"""What a provisioner answers, and what it is told: JSON, one object each, versioned, with limits and a schema.

A target's provisioner publishes on `fleetlog.<cluster>.provision.<target>`, as a request. `{"done": true}` means that
the answer is in the log, and only then may the scale event be acknowledged; `{"error": {"code", "message"}}` says why
it is not. Repeating an answer does no harm.
"""

from typing import Annotated

from msgspec import Meta

from actors.commands import Verdict
from infra.api.request import Request, VmId

Reference = Annotated[
    str, Meta(max_length=256, description="what the provider calls the machine: at most 256 characters")
]
Detail = Annotated[str, Meta(max_length=2000, description="for people: at most 2000 characters")]


class ProvisionReport(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`accepted`: a machine is on its way. `failed`: there will be none. `terminated`: nothing of it is left."""

    agent: VmId
    verdict: Verdict
    reference: Reference = ""  # with `accepted`: given back in `scale.down`
    detail: Detail = ""
    permanent: bool = False  # with `failed`: trying again would fail as well
