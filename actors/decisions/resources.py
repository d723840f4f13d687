"""CPU and memory of one agent: memory strings, and the cascade from the job over the label set to the defaults."""

import re

import msgspec

from events.envelope import Resources

MEMORY_FORM = "a number and one of k, m, g (powers of 1024), such as 512m or 1.5g"
MEMORY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,15})? ?[kKmMgG]$"
MEMORY_MOST_BYTES = 2**62
"""Far above any machine; keeps sums inside the 64 bits that rows and the wire have."""

CPUS_MOST = 256.0

_MEMORY = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,15}))? ?([kKmMgG])")
_UNIT_BYTES = {"k": 1024, "m": 1024**2, "g": 1024**3}


class ResourceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a job, a label set or the defaults declare; zero means undeclared, field by field."""

    requests: Resources = Resources()
    limits: Resources = Resources()


def parse_memory(text: str) -> int:
    """Return the bytes that a memory string means; fractions are floored to whole bytes.

    Raises:
        ValueError: it has another form (`4Gi`, a bare number, empty) or is absurdly large; names the value
            and the accepted form.
    """
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a memory size: use {MEMORY_FORM}")
    whole, fraction, unit = found[1], found[2] or "", found[3].lower()
    # In whole numbers, so that no size is rounded twice.
    parts = int("1" + "0" * len(fraction))
    size_bytes = int(whole + fraction) * _UNIT_BYTES[unit] // parts
    if size_bytes > MEMORY_MOST_BYTES:
        raise ValueError(f"{text!r} is more memory than any machine has: use {MEMORY_FORM}")
    return size_bytes


def format_memory(size_bytes: int) -> str:
    """Return a memory string of the largest unit that is exact, else the floored kibibytes: for people."""
    for unit in ("g", "m", "k"):
        if size_bytes and size_bytes % _UNIT_BYTES[unit] == 0:
            return f"{size_bytes // _UNIT_BYTES[unit]}{unit}"
    return f"{size_bytes // 1024}k"


def declared(cpus: float | None, memory_bytes: int | None) -> Resources:
    """Return the resources, with what is undeclared left out of their form on the wire and in digests."""
    # msgspec leaves out a default that is the very same object, and a computed 0.0 is another one.
    if cpus:
        return Resources(cpus=cpus, memory_bytes=memory_bytes or 0)
    return Resources(memory_bytes=memory_bytes or 0)


def request_over_limit(spec: ResourceSpec) -> str | None:
    """Return what is wrong when one declaration requests more than it limits, else None."""
    wrong = []
    if spec.limits.cpus and spec.requests.cpus > spec.limits.cpus:
        wrong.append(f"requests {spec.requests.cpus:g} cpus, limit {spec.limits.cpus:g}")
    if spec.limits.memory_bytes and spec.requests.memory_bytes > spec.limits.memory_bytes:
        wanted, most = format_memory(spec.requests.memory_bytes), format_memory(spec.limits.memory_bytes)
        wrong.append(f"requests {wanted} of memory, limit {most}")
    return "; ".join(wrong) or None


def resolve(
    job: ResourceSpec | None, label_set: ResourceSpec | None, defaults: ResourceSpec | None
) -> ResourceSpec:
    """Return what one agent gets: per field and per side the job's word, else the label set's, else the default.

    A side that nobody declares then copies the other. Where a request from one level exceeds a limit from
    another, the nearer declaration wins and the other follows it, so a request never exceeds its limit. What
    stays zero is undeclared: no backend may be handed it as a limit.
    """
    levels = tuple(spec for spec in (job, label_set, defaults) if spec is not None)
    cpus = _settled(
        _nearest([level.requests.cpus for level in levels]), _nearest([level.limits.cpus for level in levels])
    )
    memory = _settled(
        _nearest([level.requests.memory_bytes for level in levels]),
        _nearest([level.limits.memory_bytes for level in levels]),
    )
    return ResourceSpec(requests=declared(cpus[0], int(memory[0])), limits=declared(cpus[1], int(memory[1])))


def _nearest(values: list[float] | list[int]) -> tuple[float, int]:
    """Return the first declared value and how far away it was declared."""
    return next(((value, level) for level, value in enumerate(values) if value), (0, len(values)))


def _settled(request: tuple[float, int], limit: tuple[float, int]) -> tuple[float, float]:
    wanted, most = request[0] or limit[0], limit[0] or request[0]
    if wanted > most:
        nearer = wanted if request[1] < limit[1] else most
        return nearer, nearer
    return wanted, most
