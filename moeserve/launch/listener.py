"""The listening socket, opened before anything is loaded: a port in use is found at once."""

from __future__ import annotations

import logging
import socket

from moeserve import config

logger = logging.getLogger(__name__)


def listen_on(server: config.ServerConfig) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; HTTP processes inherit it.

    Raises:
        OSError: it can not; the text names the settings and the reason.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        listener = socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"--host {server.host} --port {server.port}: {error.strerror}") from error
    if server.host not in ("127.0.0.1", "::1", "localhost") and not server.api_key:
        logger.warning("listening on %s without --api-key: anyone may use it", server.host)
    return listener
