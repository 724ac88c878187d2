"""Throttled nodes on one Linux machine: feel a slow link without a cluster.

`network` makes them out of network namespaces, `launcher` runs a script on them as torchrun would, `cli` is
`lowbw-lab`.
"""

from lightning_lowbw.lab.launcher import Report, launch
from lightning_lowbw.lab.network import LabError, Network, Traffic, parse_rate

__all__ = ["LabError", "Network", "Report", "Traffic", "launch", "parse_rate"]
