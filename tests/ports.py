"""A port where processes of a test meet."""

import random
import socket

# Below those that systems give to whoever asks for any (Linux: from 32768): between the asking and the meeting, one of the many sockets of
# tests beside this one would take such a port at times.
FIRST, LAST = 12000, 32000
_chance = random.SystemRandom()  # tests seed the other, all with the same numbers


def free_port() -> int:
    """One that nobody listens on."""
    while True:
        port = _chance.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
