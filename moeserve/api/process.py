"""The HTTP process: ``python -m moeserve.api.process``, its configuration as JSON on stdin.

Several of these may share one listening socket. Each talks to every rank. The supervisor imports
this module for ``HttpProcessConfig`` alone, so the server's own imports stand inside ``main``.
"""

from __future__ import annotations

import logging
import socket
import sys

import msgspec
import setproctitle

from moeserve import log
from moeserve.config import ServeConfig
from moeserve.status import Failed, Ready, StatusPipe, die_with_parent

logger = logging.getLogger(__name__)


class HttpProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a starter tells an HTTP process.

    rank_endpoints: zmq addresses of rank 0, 1, ...; control_endpoint: where the supervisor pushes
    ``Dead`` and ``Drain``; listen_fd: an inherited listening socket (None: bind host and port);
    status_fd: writing end of the supervisor's pipe; parent_pid: whose death ends us;
    curve_public/curve_secret: the job's zmq keys for tcp endpoints.
    """

    config: ServeConfig
    rank_endpoints: list[str]
    control_endpoint: str | None = None
    listen_fd: int | None = None
    server_index: int = 0
    status_fd: int | None = None
    parent_pid: int | None = None
    curve_public: str | None = None
    curve_secret: str | None = None


def main() -> None:
    """Serves until told to stop."""
    process = msgspec.json.decode(sys.stdin.buffer.read(), type=HttpProcessConfig)
    die_with_parent(process.parent_pid)
    setproctitle.setproctitle(f"moeserve http {process.server_index}")
    log.setup(f"http {process.server_index}", process.config.server.log_level)
    status = StatusPipe(process.status_fd)
    try:
        with status.phase("load the tokenizer"):
            from moeserve.api.assembly import assemble

            http = assemble(process)
        listener = listening_socket(process)
    except (ValueError, OSError) as error:
        status.send(Failed(str(error)))
        logger.error("%s", error)
        raise SystemExit(1) from error
    http.run(listener, on_ready=lambda: status.send(Ready({"address": address(listener)})))


def listening_socket(process: HttpProcessConfig) -> socket.socket:
    """The inherited socket, or a new one on the configured address."""
    if process.listen_fd is not None:
        return socket.socket(fileno=process.listen_fd)
    server = process.config.server
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    return socket.create_server((server.host, server.port), family=family, backlog=2048)


def address(listener: socket.socket) -> str:
    """``host:port`` of a socket."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


if __name__ == "__main__":
    main()
