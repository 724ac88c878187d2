"""Throttled nodes on one Linux machine: test a slow link without a cluster.

`network` makes them out of network namespaces, which belong to a process of their own (`namespaces`); `launcher` runs
a script on them as torchrun would; `cli` is `lowbw-lab`.
"""

from lightning_lowbw.tools.lab.launcher import Report, launch
from lightning_lowbw.tools.lab.namespaces import LabError
from lightning_lowbw.tools.lab.network import Network, Traffic, parse_rate, read_sent_bytes

__all__ = ["LabError", "Network", "Report", "Traffic", "launch", "parse_rate", "read_sent_bytes"]
