"""The kinds of value a fleet file has: each with its limits, its accepted form in words, and its canonical form."""

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from actors.decisions.labels import RESERVED_PREFIX, is_reserved, normalise
from actors.decisions.resources import (
    CPUS_MOST,
    MEMORY_FORM,
    MEMORY_PATTERN,
    ResourceSpec,
    declared,
    parse_memory,
    request_over_limit,
)
from events.envelope import Resources
from infra.config.host_access import ENTRY_FORM, parse_entry
from infra.config.walker import Form

LONGEST_WAIT_S = 86_400.0
ENVIRONMENT_PREFIX = "FLEETLOG_"


def _label(text: str) -> str:
    if is_reserved(text):
        raise ValueError(f'"{text}" begins with {RESERVED_PREFIX}, which only fleetlog gives out')
    return text.lower()


def _roles(roles: tuple[str, ...]) -> tuple[str, ...] | None:
    return None if "all" in roles else tuple(dict.fromkeys(roles))


def _nats_url(text: str) -> str:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address with a user or password in it: agents get credentials of their own")
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or port == 0:
        raise ValueError("not the address of a NATS server")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError("an address with more than host and port")
    return text


def _environment_name(text: str) -> str:
    if text.upper().startswith(ENVIRONMENT_PREFIX):
        raise ValueError(f"{text} begins with {ENVIRONMENT_PREFIX}, which fleetlog sets itself")
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.IPv4Network(text))
    except ValueError:
        raise ValueError(f'"{text}" is not an IPv4 network') from None


def _entry(text: str) -> str:
    parse_entry(text)
    return text


def _memory(text: str) -> str:
    if parse_memory(text) == 0:
        raise ValueError(f'"{text}" is less than a byte: leave the key out for no limit')
    return text


Name = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$",
        description="1 to 63 lowercase letters, digits and dashes, not starting with a dash",
    ),
]
Label = Annotated[
    str,
    Meta(
        pattern=r"^[^\s,\x00-\x1f\x7f]{1,128}$",
        description=f"a label: 1 to 128 characters, no spaces or commas, not beginning with {RESERVED_PREFIX}",
        extra={"read": _label},
    ),
]
Labels = Annotated[tuple[Label, ...], Meta(min_length=1, max_length=64, extra={"read": normalise})]
MandatoryLabels = Annotated[tuple[Label, ...], Meta(max_length=64, extra={"read": normalise})]
RoleWord = Literal["builder", "init-runner", "all"]
Roles = Annotated[tuple[RoleWord, ...], Meta(extra={"read": _roles})]
Seconds = Annotated[float, Meta(ge=1, le=LONGEST_WAIT_S)]
GraceSeconds = Annotated[float, Meta(ge=0, le=3600)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
NatsUrl = Annotated[
    str,
    Meta(
        description="nats://host:port or tls://host:port, without user and password",
        max_length=1024,
        extra={"read": _nats_url, "secret": True},
    ),
]
AbsolutePath = Annotated[
    str, Meta(pattern=r"^/[^\x00]{0,4094}$", description="an absolute path, such as /opt/agent/run")
]
Argument = Annotated[str, Meta(pattern=r"^[^\x00]*$", max_length=131_071, description="text")]
EnvironmentName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$",
        description=f"a name of letters, digits and underscores, not beginning with {ENVIRONMENT_PREFIX}",
        extra={"read": _environment_name},
    ),
]
EnvironmentValue = Annotated[
    str, Meta(pattern=r"^[^\x00]*$", max_length=32_766, description="text", extra={"secret": True})
]
Environment = dict[EnvironmentName, EnvironmentValue]
Cpus = Annotated[
    float, Meta(gt=0, le=CPUS_MOST, description=f"a number of cores above 0, at most {CPUS_MOST:g}")
]
CapCpus = Annotated[float, Meta(gt=0, le=1e6, description="a number of cores above 0")]
Memory = Annotated[str, Meta(pattern=MEMORY_PATTERN, description=MEMORY_FORM, extra={"read": _memory})]
Network = Annotated[str, Meta(description="an IPv4 network such as 10.9.0.0/24", extra={"read": _network})]
HostAccess = Annotated[str, Meta(description=ENTRY_FORM, extra={"read": _entry})]


class ResourceCap(msgspec.Struct, frozen=True, kw_only=True):
    """The most that the requests of all agents together may sum to; None: no cap."""

    max_cpus: float | None = None
    max_memory_bytes: int | None = None


class CapForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cap as it is written."""

    max_cpu: CapCpus | None = None
    max_memory: Memory | None = None


class QuantityForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side of a resource request as it is written."""

    cpus: Cpus | None = None
    memory: Memory | None = None


class ResourcesForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A resource request as it is written: both sides, or `cpus` and `memory` for both at once."""

    requests: QuantityForm | None = None
    limits: QuantityForm | None = None
    cpus: Cpus | None = None
    memory: Memory | None = None


def _cap(form: CapForm) -> ResourceCap:
    most = None if form.max_memory is None else parse_memory(form.max_memory)
    return ResourceCap(max_cpus=form.max_cpu, max_memory_bytes=most)


def _side(cpus: float | None, memory: str | None) -> Resources:
    return declared(cpus, None if memory is None else parse_memory(memory))


def _spec(form: ResourcesForm) -> ResourceSpec:
    if form.requests is None and form.limits is None:
        both = _side(form.cpus, form.memory)
        return ResourceSpec(requests=both, limits=both)
    if form.cpus is not None or form.memory is not None:
        raise ValueError("cpus or memory beside requests and limits: it is not clear which side they mean")
    wanted, most = form.requests or QuantityForm(), form.limits or QuantityForm()
    spec = ResourceSpec(requests=_side(wanted.cpus, wanted.memory), limits=_side(most.cpus, most.memory))
    if (wrong := request_over_limit(spec)) is not None:
        raise ValueError(wrong)
    return spec


FORMS: dict[type, Form] = {
    ResourceSpec: Form(written=ResourcesForm, convert=_spec),
    ResourceCap: Form(written=CapForm, convert=_cap),
}
"""Types that look different in files: after the load only the types themselves are seen."""
