"""From what goes wrong while a request is carried out to what is answered: every trouble is an answer."""

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from actors.errors import Conflict, DriverError, LogFull, LogUnavailable, Refused
from infra.api.messages import Malformed, failure

_LOG = logging.getLogger("fleetlog.api")


_Answer = TypeVar("_Answer", msgspec.Struct, msgspec.Struct | None)


def answer_to(verb: str, coordinator: str, carry_out: Callable[[], _Answer]) -> _Answer:
    """Carry a request out and return its answer, or the one that says why there is none."""
    try:
        return carry_out()
    except Malformed as error:
        return failure("malformed", str(error))
    except Refused as error:
        return failure(error.code, str(error))
    except Conflict as error:
        return failure("conflict", f"{error}; ask again")
    except LogFull as error:
        return failure("log-full", str(error))
    except LogUnavailable as error:
        return failure("log-unavailable", str(error))
    except TimeoutError as error:
        return failure("timeout", str(error))
    except DriverError as error:
        return failure("host", str(error))
    except Exception:  # noqa: BLE001 - logged with its trace, and answered
        # A bug of ours must reach whoever waits, and must not end the thread that serves everybody.
        _LOG.exception("request %s could not be handled: this is a bug in fleetlog", verb)
        return failure(
            "internal", f"coordinator {coordinator} has a bug: its own log has the trace; report it"
        )


def overloaded() -> msgspec.Struct:
    """Return the answer of a coordinator that has no room for another request."""
    return failure("overloaded", "too many requests wait for this coordinator: ask again in a second")


def outcome(answer: msgspec.Struct) -> str:
    """Return `ok` or the error's code, for counting."""
    error = getattr(answer, "error", None)
    return "ok" if error is None else str(error.code)
