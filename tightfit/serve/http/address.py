"""Checks that the server can listen at its address before a model is loaded for minutes; the server's host names."""

import errno
import ipaddress
import socket

from tightfit.errors import UserError

WAYS = "give 127.0.0.1, or 0.0.0.0 to let other machines in"


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def own_names(host: str) -> frozenset[str]:
    """Host names of a server that listens on loopback alone; empty for one that other machines can reach."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host.lower() == "localhost"
    own = f"[{host}]" if ":" in host else host.lower()
    return LOOPBACK | {own} if is_loopback else frozenset()


def check_address(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, and a port that another program listens on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UserError(f"--host is {host!r}, which has no address; {WAYS}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: one that just ended is no obstacle
        try:
            probe.bind(address)
        except OSError as error:
            raise UserError(_sentence(host, port, error)) from None


def _sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another program; give another with --port, or end that one"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights than this user has; give one above 1023 with --port"
    return f"--host is {host!r}, which is no address of this machine; {WAYS}"
