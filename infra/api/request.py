"""What requests are made of: the base of all of them, and the forms of their fields with their limits."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_LABEL = r"^[^\s,\x00-\x1f\x7f]{1,128}$"
_VM = r"^[a-z0-9][a-z0-9-]{0,63}$"
_SCALER = r"^[a-z0-9][a-z0-9-]{0,62}$"
_DEMAND = r"^[a-z0-9][a-z0-9-]{7,63}$"
FORMS = {
    _LABEL: "a label: 1 to 128 characters without spaces and commas",
    _VM: "an agent's id: 1 to 64 lowercase letters, digits and dashes",
    _SCALER: "a scaler's name: 1 to 63 lowercase letters, digits and dashes",
    _DEMAND: "a demand's id: 8 to 64 lowercase letters, digits and dashes",
}

Label = Annotated[str, Meta(pattern=_LABEL, description=FORMS[_LABEL])]
Labels = Annotated[tuple[Label, ...], Meta(max_length=64)]
VmId = Annotated[str, Meta(pattern=_VM, description=FORMS[_VM])]
ScalerName = Annotated[str, Meta(pattern=_SCALER, description=FORMS[_SCALER])]
DemandId = Annotated[str, Meta(pattern=_DEMAND, description=FORMS[_DEMAND])]
Text = Annotated[str, Meta(max_length=256)]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
Cpus = Annotated[float, Meta(ge=0, le=1024)]
MemoryBytes = Annotated[int, Meta(ge=0, le=1 << 50)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every request has."""

    version: Literal[1] = 1
