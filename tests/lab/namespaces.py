"""Whether this machine can make the lab's nodes."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from lightning_lowbw.lab import LabError, Network


def can_make_namespaces() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with Network([1e9]):
            return True
    except LabError:
        return False


needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, iproute2 and network namespaces"),
]
