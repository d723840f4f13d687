"""Which scaler's label set takes a job: labels, gates, platform taints, roles, and the most specific set wins."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

import msgspec

RESERVED_PREFIX = "fleetlog:"
"""Labels that only fleetlog gives out; refused in the fleet file in any case of letters."""

Role = Literal["builder", "init-runner"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Kinds of work beyond plain execution that an agent may be given."""

Os = Literal["linux", "macos", "windows"]
Arch = Literal["x64", "arm64"]

PLAIN_TAINTS = frozenset({"windows", "macos", "arm64"})
"""Platform words that taint the one label set they are declared in, for scalers without a declared `platform`."""

_OS_LABELS = {
    "linux": ("os:linux",),
    "macos": ("os:macos", "os:darwin"),
    "windows": ("os:windows", "os:win32"),
}
_ARCH_LABELS = {"x64": ("arch:x64", "arch:amd64"), "arm64": ("arch:arm64",)}
_SYSTEMS: dict[str, Os] = {"linux": "linux", "darwin": "macos", "windows": "windows"}
_MACHINES: dict[str, Arch] = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class Platform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a scaler's agents run on."""

    os: Os
    arch: Arch


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's own host is: our word where it is a platform we know, the raw one where not."""

    os: str = "linux"
    arch: str = "x64"


class RoutableScaler(msgspec.Struct, frozen=True, kw_only=True):
    """What matching needs to know of one scaler.

    Gates are derived from it and never handed in beside the label sets, so a gate cannot belong to the wrong
    set. `roles` None: every role; empty: plain execution only. A retiring scaler is never offered.
    """

    name: str
    backend: str
    label_sets: tuple[tuple[str, ...], ...]
    mandatory_labels: tuple[str, ...] = ()
    platform: Platform | None = None
    roles: tuple[Role, ...] | None = None
    retiring: bool = False
    host: Host = Host()


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One label set, ready to be matched. Gate and agent labels come from here and nowhere else [invariant 92].

    `labels` are the declared ones, by which a driver knows what to start. `enriched` is what a job may ask
    for, `gate` what it must ask for, `agent_labels` what the agent is given and its credential is bound to.
    """

    scaler: str
    backend: str
    index: int
    labels: tuple[str, ...]
    enriched: frozenset[str]
    gate: tuple[str, ...]
    agent_labels: tuple[str, ...]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """This label set takes the job."""

    route: Route


class NoMatch(msgspec.Struct, frozen=True, kw_only=True):
    """No scaler has these labels. `available` names every label set that is on offer, with its scaler."""

    labels: tuple[str, ...]
    exclude: tuple[str, ...]
    available: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def message(self) -> str:
        """Say what was asked for and what there is."""
        asked = f"no scaler takes a job that asks for {shown(self.labels)}"
        if self.exclude:
            asked += f" and excludes {shown(self.exclude)}"
        there = "; ".join(f"{scaler} {shown(labels)}" for scaler, labels in self.available)
        return f"{asked}; there are: {there or 'no label sets at all'}"


Verdict = Literal[
    "chosen",  # the job goes here
    "less-specific",  # it would take the job, another set is chosen before it
    "missing-labels",  # the job asks for labels it does not have
    "gated",  # it only takes jobs that ask for its gate
    "excluded",  # the job refuses one of its labels
    "retiring",  # its scaler left the configuration and only drains
]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one label set would or would not take the job; `labels` are those that decided it."""

    scaler: str
    backend: str
    index: int
    label_set: tuple[str, ...]
    verdict: Verdict
    labels: tuple[str, ...]
    reason: str


def normalise(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the labels in lower case, each once, sorted: the form in which they are compared."""
    return tuple(sorted({label.lower() for label in labels}))


def label_key(labels: Iterable[str]) -> str:
    """Return the normalised labels joined with commas: two label sets are the same when their keys are."""
    return ",".join(normalise(labels))


def shown(labels: Iterable[str]) -> str:
    """Return labels as people write them."""
    return f"[{', '.join(labels)}]"


def is_reserved(label: str) -> bool:
    """Tell whether only fleetlog may give out this label."""
    return label.lower().startswith(RESERVED_PREFIX)


def host_of(system: str, machine: str) -> Host:
    """Return the host from what the kernel calls its system and machine, such as `Linux` and `x86_64`."""
    system, machine = system.lower(), machine.lower()
    return Host(os=_SYSTEMS.get(system, system), arch=_MACHINES.get(machine, machine))


def platform_of(scaler: RoutableScaler) -> Platform | None:
    """Return the declared platform, else the host's for host processes, else none: no taint."""
    if scaler.platform is not None or scaler.backend != "bare-metal":
        return scaler.platform
    for os in get_args(Os):
        for arch in get_args(Arch):
            if (os, arch) == (scaler.host.os, scaler.host.arch):
                return Platform(os=os, arch=arch)
    return None


def taints(platform: Platform | None) -> tuple[str, ...]:
    """Return the words a job must ask for to get a platform that is not the default, linux on x64."""
    if platform is None:
        return ()
    words = [platform.os] if platform.os != "linux" else []
    return normalise(words + ([platform.arch] if platform.arch == "arm64" else []))


def gate(
    labels: Iterable[str], mandatory_labels: Iterable[str], platform: Platform | None
) -> tuple[str, ...]:
    """Return what a job must ask for before this label set takes it.

    The scaler's mandatory labels, the taints of its platform, and those plain platform words that *this* set
    declares: a union over the sets of a scaler would make the linux set of a mixed scaler unreachable.
    """
    plain = PLAIN_TAINTS.intersection(normalise(labels))
    return normalise((*mandatory_labels, *taints(platform), *plain))


def role_labels(roles: Iterable[Role] | None) -> tuple[str, ...]:
    """Return the labels that let work of these roles be routed; None is every role."""
    return tuple(f"{RESERVED_PREFIX}role:{role}" for role in (ROLES if roles is None else roles))


@lru_cache(maxsize=1024)
def routes(scaler: RoutableScaler) -> tuple[Route, ...]:
    """Return the scaler's label sets ready to be matched, in their order."""
    platform = platform_of(scaler)
    given = (
        f"{RESERVED_PREFIX}agent:{scaler.backend}",
        f"{RESERVED_PREFIX}scaler:{scaler.name}",
        *role_labels(scaler.roles),
        *taints(platform),
    )
    return tuple(
        Route(
            scaler=scaler.name,
            backend=scaler.backend,
            index=index,
            labels=normalise(labels),
            enriched=frozenset(normalise((*labels, *given, *_platform_labels(scaler, platform)))),
            gate=gate(labels, scaler.mandatory_labels, platform),
            agent_labels=normalise((*labels, *given)),
        )
        for index, labels in enumerate(scaler.label_sets)
    )


def match(
    scalers: Sequence[RoutableScaler], labels: Iterable[str], exclude: Iterable[str] = ()
) -> Match | NoMatch:
    """Return the label set that takes a job asking for `labels` and refusing every one of `exclude`.

    A set takes the job when it has all its labels and none of the excluded, and the job asks for all of the
    set's gate. The set with the fewest labels wins, the first of equals. A job that asks for nothing gets the
    first set that has no gate.
    """
    asked, refused = frozenset(normalise(labels)), frozenset(normalise(exclude))
    takers = [route for route in _offered(scalers) if _against(route, asked, refused) is None]
    if not takers:
        available = tuple((route.scaler, route.labels) for route in _offered(scalers))
        return NoMatch(labels=tuple(sorted(asked)), exclude=tuple(sorted(refused)), available=available)
    # min and the list both keep the order of the file, so ties go to the first.
    return Match(route=min(takers, key=lambda route: len(route.enriched)) if asked else takers[0])


def explain(
    scalers: Sequence[RoutableScaler], labels: Iterable[str], exclude: Iterable[str] = ()
) -> tuple[Explanation, ...]:
    """Return for every label set of every scaler why it would or would not take the job, in the file's order."""
    asked, refused = frozenset(normalise(labels)), frozenset(normalise(exclude))
    found = match(scalers, asked, refused)
    chosen = found.route if isinstance(found, Match) else None
    return tuple(
        _explained(scaler, route, chosen, _against(route, asked, refused))
        for scaler in scalers
        for route in routes(scaler)
    )


def _explained(
    scaler: RoutableScaler,
    route: Route,
    chosen: Route | None,
    against: tuple[Verdict, tuple[str, ...], str] | None,
) -> Explanation:
    verdict: Verdict
    labels: tuple[str, ...]
    if scaler.retiring:
        verdict, labels, reason = "retiring", (), "its scaler is retiring and takes no new jobs"
    elif against is not None:
        verdict, labels, reason = against
    elif chosen is None or route == chosen:
        verdict, labels, reason = "chosen", route.labels, "it has all labels and is the most specific"
    else:
        before = f"{chosen.scaler} label_sets[{chosen.index}]"
        verdict, labels, reason = (
            "less-specific",
            route.labels,
            f"it would take the job; {before} comes first",
        )
    return Explanation(
        scaler=route.scaler,
        backend=route.backend,
        index=route.index,
        label_set=route.labels,
        verdict=verdict,
        labels=labels,
        reason=reason,
    )


def _offered(scalers: Sequence[RoutableScaler]) -> Iterator[Route]:
    for scaler in scalers:
        if not scaler.retiring:
            yield from routes(scaler)


def _against(
    route: Route, asked: frozenset[str], refused: frozenset[str]
) -> tuple[Verdict, tuple[str, ...], str] | None:
    if missing := tuple(sorted(asked - route.enriched)):
        return "missing-labels", missing, f"it does not have {shown(missing)}"
    if unwanted := tuple(sorted(route.enriched & refused)):
        return "excluded", unwanted, f"the job excludes {shown(unwanted)}"
    if closed := tuple(label for label in route.gate if label not in asked):
        return "gated", closed, f"it only takes jobs that ask for {shown(closed)}"
    return None


def _platform_labels(scaler: RoutableScaler, platform: Platform | None) -> tuple[str, ...]:
    if platform is not None:
        os, arch = str(platform.os), str(platform.arch)
    elif scaler.backend == "bare-metal":
        os, arch = scaler.host.os, scaler.host.arch
    else:
        os, arch = "linux", scaler.host.arch
    return (*_OS_LABELS.get(os, (f"os:{os}",)), *_ARCH_LABELS.get(arch, (f"arch:{arch}",)))
