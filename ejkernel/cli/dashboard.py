"""`ejkernel dashboard`: recorded runs, the store, and runs under way, in the browser."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import click

from . import options
from .exits import Exit, Failure, os_reason
from .output import State, note
from .stores import open_place

PORT = 8417
SHORTEST_TOKEN = 16


@click.command(short_help="Show runs and stored configs in the browser.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="NAME",
    help="Where to listen. Anything but this machine itself needs a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    metavar="N",
    help="0: any free one.",
)
@click.option(
    "--token",
    metavar="TEXT",
    help="What readers must bring.  [default: none on this machine, else a new one]",
)
@options.store
@click.option("--open", "opens", is_flag=True, help="Show it in the browser.")
@options.with_state
def dashboard(
    state: State, host: str, port: int, token: str | None, source: str | None, opens: bool
) -> None:
    """Show recorded runs, stored configs and runs under way in the browser, until Ctrl-C.

    Runs of other processes advance in the page while they are tuning. It is read-only, and answers
    on this machine alone unless --host says otherwise.
    """
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{SHORTEST_TOKEN},}}", token):
        raise click.UsageError(
            f"--token: give at least {SHORTEST_TOKEN} letters, digits, '-', '_', '.' or '~'"
        )
    place = open_place(source, or_nowhere=True)
    if place.store is None and source is not None:
        raise click.UsageError("--store: the dashboard shows a store (a folder or a URL)")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise Failure(
            f"the dashboard needs Starlette and uvicorn (the extra `dashboard`): {error}. "
            "pip install starlette uvicorn",
            Exit.MISSING,
        ) from error
    import jax

    from ..dashboard.access import Access
    from ..dashboard.app import make_app
    from ..dashboard.contents import Contents
    from ..dashboard.server import is_loopback, listen, serve, url_of

    try:
        listening = listen(host, port)
    except (OSError, UnicodeError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise Failure(
            f"--host {host} --port {port}: cannot listen there: {reason}; --port 0 takes any free "
            "port"
        ) from error
    with contextlib.ExitStack() as done:
        done.enter_context(listening)
        if token is None and not is_loopback(listening):
            import secrets

            token = secrets.token_urlsafe(24)
        url = url_of(listening, host)
        names = frozenset({"localhost", host.lower(), socket.gethostname().lower()})
        cookie = f"ejkernel-dashboard-{listening.getsockname()[1]}"
        app = make_app(Contents(place.store), Access(names, token, cookie))
        address = url if token is None else f"{url}?token={token}"
        # Never the device that somebody is tuning on: it would be busy, or its memory taken.
        jax.config.update("jax_platforms", "cpu")
        # From here on Ctrl-C is the way to end it, and no failure.
        done.enter_context(contextlib.suppress(KeyboardInterrupt))
        state.result({"url": address}, f"dashboard: {address}")
        if not state.as_json:
            note("Ctrl-C ends it")
        if opens:
            import webbrowser

            # Beside the server: a browser in the terminal returns when it is closed.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        serve(app, listening)
