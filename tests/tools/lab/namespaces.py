"""Whether this machine can make the lab's nodes."""

from __future__ import annotations

import pytest

from lightning_lowbw.tools.lab import LabError, Network


def what_forbids_the_lab() -> str:
    try:
        with Network([1e9]):
            return ""
    except LabError as error:
        return str(error)


REFUSAL = what_forbids_the_lab()
needs_lab = [pytest.mark.lab, pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)]
