"""The listening socket: opened before anything slow happens, closed without losing a caller.

The launcher opens it and every API process inherits it; the port is closed once all of them have
closed it.
"""

from __future__ import annotations

import ctypes
import socket
import struct

from server.http.access import is_loopback

SO_ATTACH_FILTER = 26  # of Linux; Python does not name it
# For handshakes that have begun to end, and for their connections to be accepted.
HANDSHAKE_SECONDS = 0.5
LOOPBACK_HANDSHAKE_SECONDS = 0.05
# Classic BPF on the TCP header: a segment with SYN set and ACK unset is dropped.
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # SYN alone: the next instruction, else the one after
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # take all of it
)


class AddressInUse(OSError):
    """Another program listens there; the message names the remedy."""


def bind(host: str, port: int) -> socket.socket:
    """The listening socket.  Raises AddressInUse, OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == 98 or "in use" in str(error):
            raise AddressInUse(
                f"{host}:{port} is in use: stop the program that listens there, or choose another "
                "--port"
            ) from None
        raise


def stop_handshakes(listener: socket.socket) -> float:
    """Let no new handshake begin; returns the seconds until all that had begun are accepted.

    A socket that is closed resets the connections that wait to be accepted, whose callers may have
    sent a request already, which balancers do not send again.  Behind this filter nothing waits
    after a while.  A caller who begins meanwhile tries again after a second, as TCP does, and is
    refused by then: nothing was sent, so a balancer sends the request to another server.
    Returns 0 where the system has no such filter.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in DROP_SYN)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(DROP_SYN), ctypes.addressof(buffer))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError:
        return 0.0
    loopback = is_loopback(listener.getsockname()[0])
    return LOOPBACK_HANDSHAKE_SECONDS if loopback else HANDSHAKE_SECONDS
