"""What can go wrong with servers we run ourselves."""


class ServerFailed(Exception):  # noqa: N818 - the house names errors by what happened
    """An embedded server did not start, answer or stop; the message ends with the tail of its log."""


class DataDirectoryRefused(Exception):  # noqa: N818
    """The data directory cannot be used: in use by another coordinator, not ours, or open to others."""
