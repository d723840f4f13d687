"""The answers themselves: `/health`, `/metrics`, and for everything else what there is instead."""

import logging
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infra.http.health import Health, undetermined

_log = logging.getLogger("fleetlog.http")
_PATH_SHOWN = 200
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def application(
    health: Callable[[], Health], registry: CollectorRegistry, *, routes: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the application: `/health`, `/metrics` and `routes`.

    `health` and the registry's collectors are called on the server's loop and must answer at once, from what is
    known: no I/O.
    """
    pages = _Pages(health, registry)
    known = [
        Route("/health", pages.health, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
        *routes,
    ]
    pages.paths = tuple(_paths(known))
    app = Starlette(
        routes=known,
        exception_handlers={HTTPException: pages.refused, Exception: pages.failed},
    )
    app.router.redirect_slashes = False  # a path is there or it is not
    return app


class _Pages:
    def __init__(self, health: Callable[[], Health], registry: CollectorRegistry) -> None:
        self._health = health
        self._registry = registry
        self.paths: tuple[str, ...] = ()

    async def health(self, request: Request) -> Response:
        """Answer 200 when all is well, else 503; the body says what is wrong and what to do."""
        del request
        try:
            health = self._health()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is "not well"
            _log.exception("the health check failed")
            health = undetermined(error)
        return _json(health, HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: Request) -> Response:
        """Answer all metrics, in OpenMetrics for whoever accepts that."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            text = encode(self._registry)
        except (TypeError, ValueError):  # it asks for a version that is none
            text, content_type = generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        return Response(text, headers={**_HEADERS, "Content-Type": content_type})

    async def refused(self, request: Request, error: Exception) -> Response:
        """Answer what is not there, or not for this method."""
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        path = request.url.path[:_PATH_SHOWN]
        headers = dict(error.headers or {})
        match status:
            case HTTPStatus.NOT_FOUND:
                what = f"there is nothing at {path}"
            case HTTPStatus.METHOD_NOT_ALLOWED:
                what = f"{path} does not take {request.method}, only {headers.get('Allow', 'GET, HEAD')}"
            case _:
                what = error.detail
        return _json({"error": what, "paths": self.paths}, status, headers)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Answer that the fault is ours; the error itself goes to the log."""
        del error
        what = f"{request.url.path[:_PATH_SHOWN]} failed; the coordinator's log has the error"
        return _json({"error": what, "paths": self.paths}, HTTPStatus.INTERNAL_SERVER_ERROR)


def _paths(routes: Iterable[BaseRoute]) -> Iterable[str]:
    for route in routes:
        path = getattr(route, "path", None)
        if isinstance(path, str):
            yield path


def _json(body: object, status: HTTPStatus, headers: dict[str, str] | None = None) -> Response:
    # Indented: read by people with curl as often as by machines.
    text = msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
    return Response(
        text, status_code=status, media_type="application/json", headers={**_HEADERS, **(headers or {})}
    )
