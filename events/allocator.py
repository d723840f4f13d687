"""What has happened to the addresses of one network of one host."""

from events.envelope import Event


class AddressLeased(Event, frozen=True, kw_only=True, tag="allocator.leased"):
    """A machine holds this address, in the same batch as `vm.requested`; freed by `vm.reaped`."""

    vm: str
    address: str


AllocatorEvent = AddressLeased
