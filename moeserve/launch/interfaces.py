"""Network interfaces by name: which address a rank listens on."""

from __future__ import annotations

import socket

import psutil

from moeserve import config


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        config.ConfigError: there is no such interface, or it has no IPv4 address.
    """
    addresses = {
        interface: str(item.address)
        for interface, items in psutil.net_if_addrs().items()
        for item in reversed(items)  # the first one stays
        if item.family == socket.AF_INET
    }
    if name not in addresses:
        known = ", ".join(f"{interface} ({address})" for interface, address in addresses.items())
        raise config.ConfigError(
            f"interface = {name!r}: must be one with an IPv4 address on this machine: {known}"
        )
    return addresses[name]
