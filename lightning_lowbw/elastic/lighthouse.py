"""`lowbw-lighthouse`: torchft's lighthouse, where the groups of an elastic training meet, until SIGTERM or SIGINT.

lowbw-lighthouse --bind 10.8.0.1:29510
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from lightning_lowbw.elastic.torchft_membership import _import_torchft
from lightning_lowbw.errors import ConfigurationError


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal; the options have the names that `torchft_lighthouse` gives them."""
    parser = argparse.ArgumentParser("lowbw-lighthouse", description="The lighthouse of an elastic training.")
    parser.add_argument("--bind", required=True, help="its address, as 10.8.0.1:29510; nothing there is encrypted")
    parser.add_argument("--min_replicas", type=int, default=1, help="groups that a round needs (default: 1)")
    for name, usual, what in (("join", 10_000, "a living group that is late"), ("heartbeat", 5000, "a silent group")):
        parser.add_argument(f"--{name}_timeout_ms", type=int, default=usual, help=f"wait for {what} (default: {usual})")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends := {signal.SIGINT, signal.SIGTERM})  # the server's threads inherit it
    try:
        server = _import_torchft().LighthouseServer(**vars(options))
    except (ConfigurationError, RuntimeError) as error:  # the address is in use, or not of this host
        sys.exit(f"lowbw-lighthouse: {error}")
    signal.sigwait(ends)
    server.shutdown()
