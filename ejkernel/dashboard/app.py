"""The web app: one route per page, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ..report import NotARun, Run
from ..report.plain import plain
from ..store import StoreError
from . import pages
from .access import Access, AsgiApp, Guard
from .contents import Contents, NothingThere, attempt, progress_as_plain


def make_app(contents: Contents, access: Access) -> AsgiApp:
    """The whole app: `/`, `/runs/NAME`, `/store`, each also with `.json`; `/live` for the index."""

    def index(request: Request) -> Response:
        return _html(pages.index(contents))

    def live(request: Request) -> Response:
        return HTMLResponse(pages.live(contents))

    def index_json(request: Request) -> Response:
        runs, no_runs = attempt(contents.runs)
        devices, no_store = attempt(contents.devices)
        place = None if contents.store is None else str(contents.store.path)
        return _json(
            {
                "running": _running(contents),
                "runs": [{**dataclasses.asdict(run), "url": run.url} for run in runs],
                "store": {"path": place, "devices": devices},
                "errors": [error for error in (no_runs, no_store) if error],
            }
        )

    def live_json(request: Request) -> Response:
        return _json({"running": _running(contents), "version": contents.version()})

    def run(request: Request) -> Response:
        name = request.path_params["name"]
        if name.endswith(".json"):
            return _record(contents.run(name.removesuffix(".json")))
        return _html(pages.report(contents.run(name)))

    def store(request: Request) -> Response:
        return _html(pages.report(contents.stored(request.query_params.get("device"))))

    def store_json(request: Request) -> Response:
        return _record(contents.stored(request.query_params.get("device")))

    routes = {
        "/": index,
        "/index.json": index_json,
        "/live": live,
        "/live.json": live_json,
        "/runs/{name}": run,
        "/store": store,
        "/store.json": store_json,
    }
    app = Starlette(
        routes=[Route(path, endpoint) for path, endpoint in routes.items()],
        exception_handlers={
            HTTPException: lambda request, error: _failed(request, 404, "There is no such page."),
            NothingThere: lambda request, error: _failed(request, 404, str(error)),
            NotARun: lambda request, error: _failed(request, 500, str(error)),
            StoreError: lambda request, error: _failed(request, 500, str(error)),
            OSError: lambda request, error: _failed(request, 500, str(error)),
        },
    )
    return Guard(app, access)


def _running(contents: Contents) -> list[dict[str, Any]]:
    return [progress_as_plain(progress) for progress in contents.running()]


def _html(page: pages.Page, status: int = 200) -> Response:
    return HTMLResponse(page.html, status, {"Content-Security-Policy": page.policy})


def _json(data: Any, status: int = 200) -> Response:
    text = json.dumps(plain(data), indent=1, allow_nan=False)
    return Response(f"{text}\n", status, media_type="application/json")


def _record(run: Run) -> Response:
    return Response(run.dumps(), media_type="application/json")


def _failed(request: Request, status: int, reason: str) -> Response:
    if request.url.path.endswith(".json"):
        return _json({"error": reason}, status)
    title = "Not found" if status == 404 else "This cannot be shown"
    return _html(pages.message(title, reason), status)
