"""Who may see the dashboard: requests are refused before a page is made.

A page of somebody else must not read ours through the reader's browser. So the `Host` of a request
is one of our names or an address (a name of theirs could be made to lead here), no other origin is
allowed anything, and nothing but `GET` and `HEAD` is answered. With a token, whoever does not bring
it sees nothing: once in the address, then as a cookie; programs send `Authorization: Bearer`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from .pages import COMMON_POLICY

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may see the dashboard.

    Attributes:
      names: the names of this machine that a request may call it by, besides addresses.
      token: what a reader must bring; None: everyone who can connect may read.
      cookie: the name of the cookie; cookies of one host are sent to all of its ports.
    """

    names: frozenset[str] = frozenset({"localhost"})
    token: str | None = None
    cookie: str = "ejkernel-dashboard"

    def is_ours(self, host: str) -> bool:
        """Is what a request calls us a name of ours, or an address?

        >>> [Access().is_ours(host) for host in ("localhost:80", "[::1]:80", "evil.example")]
        [True, True, False]
        """
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]+))(?::[0-9]+)?", host)
        name = (match[1] or match[2]).lower() if match else ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True

    def knows(self, given: str | None) -> bool:
        """Is it the token? Takes the same time however much of it is right."""
        if self.token is None:
            return True
        return secrets.compare_digest((given or "").encode(), self.token.encode())


class Guard:
    """Answers what is not allowed itself, and hands on the rest; adds headers to every answer."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", COMMON_POLICY)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(Request(scope))
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        access = self._access
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not access.is_ours(hosts[0]):
            words = "This dashboard is not known by that name; use localhost or an address.\n"
            return PlainTextResponse(words, 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET.\n", 405, {"Allow": "GET, HEAD"})
        if access.token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and access.knows(given):
            return self._with_cookie(request, given)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        bearer = bearer if scheme.lower() == "bearer" else ""
        if access.knows(request.cookies.get(access.cookie)) or access.knows(bearer):
            return None
        words = "This dashboard needs its token: open the address that the command printed.\n"
        return PlainTextResponse(words, 401, {"WWW-Authenticate": "Bearer"})

    def _with_cookie(self, request: Request, token: str) -> Response:
        """The same page without the token in its address, where histories would keep it."""
        # One slash: two would be the name of another host.
        path = urllib.parse.quote(f"/{request.url.path.lstrip('/')}", safe="/%")
        rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        query = f"?{urllib.parse.urlencode(rest)}" if rest else ""
        answer = RedirectResponse(f"{path}{query}", 303)
        answer.set_cookie(self._access.cookie, token, httponly=True, samesite="strict")
        return answer
