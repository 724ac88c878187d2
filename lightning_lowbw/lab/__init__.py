"""Throttled nodes on one Linux machine: test a slow link without a cluster.

`network` makes them out of network namespaces, which `keeper` holds; `permission` explains why they cannot be made;
`launcher` runs a script on them as torchrun would, `counters` reads the bytes in there, `cli` is `lowbw-lab`.
"""

from lightning_lowbw.lab.launcher import Report, launch
from lightning_lowbw.lab.network import Network, Traffic, parse_rate
from lightning_lowbw.lab.permission import LabError

__all__ = ["LabError", "Network", "Report", "Traffic", "launch", "parse_rate"]
