"""The socket of the dashboard, and the server that answers on it until Ctrl-C."""

from __future__ import annotations

import ipaddress
import socket

import uvicorn

from .access import AsgiApp


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a port, 0 for any free one. Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((address[0], port), family=family)


def is_loopback(listening: socket.socket) -> bool:
    """Can only this machine connect to it?"""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def url_of(listening: socket.socket, host: str) -> str:
    """The address to type: that of `host`, or of this machine if it listens on all addresses."""
    address, port = listening.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def serve(app: AsgiApp, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C, which is raised again once everything is closed."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,  # addresses may hold the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[listening])
