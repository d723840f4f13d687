"""What moves one coordinator's machines: a driver per scaler, the network they share, and how agents reach NATS."""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from actors.decisions.addresses import AddressPool, Lease
from actors.decisions.capacity import ScalerRules, Site
from actors.decisions.scale import Terms
from actors.driver import Driver, Resource
from actors.errors import DriverError, Refused
from actors.ports import Clock
from events import subjects
from infra.agent.access import NatsAgentAccess, RenewedToken
from infra.config.event import EventScaler
from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.config.scaler import ScalerConfig
from infra.credentials import AccountSigner
from infra.drivers.catalogue import AgentLines, build_driver, policy_of
from infra.drivers.firecracker import preflight
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.journal.address import NatsAddress
from infra.network.host import HostNetwork
from infra.network.policy import Policy, default_host_access
from projections.vm import VmState

logger = logging.getLogger("fleetlog.hosting")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Hosting:
    """Drivers, network and access for every scaler of a configuration. Built before the servers start.

    A network that cannot be made ready degrades the scalers that need it, and nothing else: their spawns fail with
    the reason.
    """

    def __init__(self, config: FleetConfig, site: Site, *, cluster: str, clock: Clock) -> None:
        self.config = config
        self._site = site
        self._cluster = cluster
        self._clock = clock
        self.trouble = ""  # why the network is not ready
        self.network: HostNetwork | None = None
        self._strangers: frozenset[str] = frozenset()
        self.drivers: dict[str, Driver] = {}
        self.access: dict[str, NatsAgentAccess] = {}
        self.rules: dict[str, ScalerRules] = {scaler.name: self._rules(scaler) for scaler in config.scalers}

    @property
    def _microvms(self) -> tuple[FirecrackerScaler, ...]:
        return tuple(scaler for scaler in self.config.scalers if isinstance(scaler, FirecrackerScaler))

    @property
    def _aggregate(self) -> str:
        """Where the leases of the network are written; the bridge's name is the network's."""
        return subjects.allocator(self._site.host, self.config.microvm_network.bridge)

    def _rules(self, scaler: ScalerConfig) -> ScalerRules:
        rules = scaler.rules(self._site.coordinator)
        if isinstance(scaler, FirecrackerScaler):
            return msgspec.structs.replace(rules, network=self._aggregate)
        return rules

    # The network, before any server listens on it.

    def open_network(self, nats_port: int | None) -> bool:
        """Make the host's network ready; return whether NATS may listen beyond loopback, on `nats_port`, guarded.

        What fails is kept in `trouble`: the scalers that need no network start all the same.
        """
        if not self._microvms:
            return False
        use_sudo = any(scaler.use_sudo for scaler in self._microvms)
        try:
            self.network = HostNetwork(self.config.microvm_network, sudo=use_sudo)
            verdict = self.network.ensure_ready()
            if not verdict.healthy:
                self.trouble = verdict.detail
            elif nats_port is not None:
                self.network.guard_port(nats_port)
                return True
        except DriverError as error:
            self.trouble = str(error)
        if self.trouble:
            logger.error("microVMs cannot be started: the host's network is not ready: %s", self.trouble)
        return False

    # Drivers and access, once it is known where NATS is.

    def build(
        self,
        *,
        state: Path,
        environment: Mapping[str, str],
        lines: AgentLines | None,
        reach: Callable[[str], None],
        address: NatsAddress,
        signer: AccountSigner | None,
        credential_s: float,
    ) -> None:
        """Build every scaler's driver, and what its agents reach NATS by."""
        for scaler in self.config.scalers:
            slot = self.rules[scaler.name].slot
            if isinstance(scaler, EventScaler):
                terms = self._terms(scaler, address)
                self.rules[scaler.name] = msgspec.structs.replace(self.rules[scaler.name], terms=terms)
            self.drivers[slot] = build_driver(
                scaler,
                owner=self._site.coordinator,
                state=state,
                environment=environment,
                lines=lines,
                reach=reach,
                net=self.network if self.network is not None and not self.trouble else _NoNetwork(self),
                host_access=self._host_access(scaler, address),
            )
            microvm = isinstance(scaler, FirecrackerScaler)
            self.access[slot] = NatsAgentAccess(
                cluster=self._cluster,
                nats_url=self._nats_url(scaler, address),
                clock=self._clock,
                signer=signer,
                ttl_s=credential_s,
                bearer=microvm,  # a guest may be too small to sign
            )

    def _terms(self, scaler: EventScaler, address: NatsAddress) -> Terms:
        return Terms(
            cluster=self._cluster,
            nats_url=self._nats_url(scaler, address),
            claim_ttl_s=scaler.claim_ttl_s,
            teardown_timeout_s=scaler.teardown_timeout_s,
        )

    def _nats_url(self, scaler: ScalerConfig, address: NatsAddress) -> str:
        """Return where a scaler's agents reach NATS: guests find a NATS of this host at their gateway."""
        if scaler.nats_url is not None or not isinstance(scaler, FirecrackerScaler):
            return scaler.nats_url or address.url
        server = address.servers[0]
        if server.host in _LOOPBACK:
            return f"nats://{self.config.microvm_network.gateway}:{server.port}"
        return address.url

    def _host_access(self, scaler: ScalerConfig, address: NatsAddress) -> tuple[str, ...]:
        return default_host_access(self.config.microvm_network.gateway, self._nats_url(scaler, address))

    # What the actors ask.

    def pools(self) -> dict[str, AddressPool]:
        """Return the address pools, by the aggregate of their leases."""
        if not self._microvms:
            return {}
        config = self.config.microvm_network
        pool = AddressPool(
            aggregate=self._aggregate, cidr=config.cidr, gateway=config.gateway, bridge=config.bridge
        )
        return {self._aggregate: pool}

    def settle_network(self, living: Mapping[str, VmState], address: NatsAddress) -> None:
        """Write the policies of the living again, and note which addresses somebody else uses.

        To be called once the fleet is known and before the first spawn: an address that is up on the host and not
        leased by the log is nobody's to hand out.
        """
        if self.network is None:
            return
        held = {vm.address: vm for vm in living.values() if vm.network == self._aggregate}
        try:
            # Without a TAP that is up there is nothing to bind, and a machine without traces takes no rules down.
            occupied = self.network.occupied()
            self.network.reapply(
                (_lease(vm), policy)
                for vm in held.values()
                if vm.address in occupied and (policy := self._policy(vm, address)) is not None
            )
            self._strangers = occupied - held.keys()
        except DriverError as error:
            self.trouble = str(error)
            logger.error("the host's network could not be settled: %s", error)  # noqa: TRY400
        if self._strangers:
            logger.warning(
                "addresses in use that the log does not account for: %s", ", ".join(sorted(self._strangers))
            )

    def _policy(self, vm: VmState, address: NatsAddress) -> Policy | None:
        """Return what a living machine may reach by today's file; None: its scaler or label set is gone from it."""
        try:
            scaler = self.config.scaler(vm.scaler)
            assert isinstance(scaler, FirecrackerScaler), "only microVMs have addresses of ours"
            return policy_of(scaler, vm.labels, self._host_access(scaler, address))
        except KeyError as gone:
            logger.warning("the policy of %s stays as it is: %s", vm.id, gone)
            return None

    def occupied(self, aggregate: str) -> frozenset[str]:
        """Return the addresses of a network that something on the host uses and the log does not account for."""
        return self._strangers if aggregate == self._aggregate else frozenset()

    def note_strangers(self, seen: frozenset[str]) -> None:
        """Take note of the addresses a sweep left in use; those noted before count as long as they are in use."""
        try:
            still = frozenset() if self.network is None else self._strangers & self.network.occupied()
        except DriverError as error:
            logger.warning("addresses withheld stay so, the network cannot be looked at: %s", error)
            still = self._strangers
        self._strangers = seen | still

    def lacks(self) -> dict[str, tuple[str, ...]]:
        """Return, for each scaler that cannot start machines as its host is now, why and the way out."""
        found: dict[str, tuple[str, ...]] = {}
        for scaler in self._microvms:
            driver = self.drivers.get(self.rules[scaler.name].slot)
            if not isinstance(driver, FirecrackerDriver):
                continue
            reasons = preflight.missing(driver.config)
            if self.trouble:
                reasons = (*reasons, f"the host's network is not ready: {self.trouble}")
            if reasons:
                found[scaler.name] = reasons
        return found

    def renewer(self, slots: Mapping[str, str]) -> "Renewing":
        """Return what renews the credential of any agent here, the way its scaler's were minted."""
        return Renewing(self.access, slots)

    def surveys(self) -> dict[str, Callable[[], tuple[Resource, ...]]]:
        """Return, by backend type, what lists everything of ours on this host."""
        by_backend: dict[str, list[Driver]] = {}
        for driver in self.drivers.values():
            by_backend.setdefault(driver.backend, []).append(driver)
        return {backend: partial(_listed, drivers) for backend, drivers in by_backend.items()}

    def close(self) -> None:
        """Let go of drivers and network; machines run on. Repeatable."""
        for driver in self.drivers.values():
            driver.close()
        if self.network is not None:
            self.network.close()


class Renewing:
    """Renews by the scaler of the machine: a guest that cannot sign gets a bearer token again."""

    def __init__(self, access: Mapping[str, NatsAgentAccess], slots: Mapping[str, str]) -> None:
        self._access = access
        self._slots = slots

    def due(self, ends_at: datetime) -> bool:
        """Tell whether a credential that ends then should be renewed now; all live equally long."""
        return any(access.due(ends_at) for access in self._access.values())

    def renew(self, vm: str, public_key: str) -> RenewedToken:
        """Return a new token for the key.

        Raises:
            Refused: the machine has no scaler here, or there is no signing key.
        """
        access = self._access.get(self._slots.get(vm, ""))
        if access is None:
            raise Refused("unknown-agent", f"agent {vm} belongs to no scaler of this coordinator")
        return access.renew(vm, public_key)


class _NoNetwork:
    """In the place of a network that is not ready: whoever needs one is told why there is none."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        """Refuse."""
        del policy, uid, gid
        raise DriverError(
            "refused", f"no network for {lease.address}: {self._hosting.trouble}", transient=True
        )

    def release(self, lease: Lease) -> None:
        """Take away what may be left of a network that was."""
        if self._hosting.network is not None:
            self._hosting.network.release(lease)


def _lease(vm: VmState) -> Lease:
    return msgspec.convert(vm.placement["lease"], Lease)


def _listed(drivers: list[Driver]) -> tuple[Resource, ...]:
    """Return what all drivers of one type find; they may share a folder, and then find the same."""
    found: dict[tuple[str, str], Resource] = {}
    for driver in drivers:
        for resource in driver.survey():
            found[(resource.kind, resource.name)] = resource
    return tuple(found.values())
