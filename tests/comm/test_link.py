"""The time model, against numbers worked out by hand; and the link is measured in time, alike on all ranks."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest
import torch.distributed as dist

from lightning_lowbw.comm.link import Link, measure_link
from lightning_lowbw.lab import Network, launch
from tests.lab.namespaces import needs_lab
from tests.programs import WITHOUT_LIGHTNING
from tests.ranks import on_ranks
from tests.sync.problem import everywhere, same_on_all

MAX_S = 1.0

PROBE = f"""{WITHOUT_LIGHTNING}
import os, sys, time
import torch
import torch.distributed as dist
from lightning_lowbw.comm.link import measure_link
dist.init_process_group("gloo")
for _ in range(3):
    dist.barrier()
    started = time.monotonic()
    link = measure_link()
    took = time.monotonic() - started
    long = torch.zeros(int(sys.argv[1]) // 4)
    dist.barrier()
    started = time.monotonic()
    dist.all_reduce(long)
    achieved = 2 * (1 - 1 / dist.get_world_size()) * long.nbytes / (time.monotonic() - started)
    if dist.get_rank() == 0:
        print(took, link.latency_s, link.bandwidth_bytes_per_s, achieved, flush=True)
dist.barrier()
os._exit(0)
"""


def test_one_rank_has_no_link() -> None:
    assert measure_link() == Link(0.0, float("inf"))


@on_ranks(3)
def test_all_ranks_of_a_group_have_the_same_link() -> None:
    """What it is depends on the load here; in the lab it is known."""
    pair = dist.new_group([1, 2])
    link = same_on_all(measure_link())
    of_pair = everywhere(measure_link(pair) if dist.get_rank() else None)
    assert of_pair[1] == of_pair[2] != of_pair[0] is None
    assert 0.0 < link.latency_s < 10.0
    assert 0.0 < link.bandwidth_bytes_per_s < 1e12


class TestInTheLab:
    pytestmark = needs_lab

    @pytest.mark.alone
    def test_the_bandwidth_of_a_shaped_link(self) -> None:
        rate = 5e7
        with Network([rate] * 3) as network, tempfile.TemporaryFile() as output:
            report = launch(
                network,
                [sys.executable, "-c", PROBE, str(int(rate / 25))],  # a third of a second
                environment={"PYTHONPATH": os.pathsep.join(sys.path)},
                timeout_s=60.0,
                output=output,
            )
            output.seek(0)
            text = output.read().decode()
        assert report.status == 0, text
        measured = [tuple(map(float, line.split())) for line in text.splitlines()[-3:]]
        seconds, latencies, bandwidths, achieved = zip(*measured, strict=True)
        assert min(seconds) < MAX_S  # of three tries, as below: other work on the machine only adds time
        assert min(latencies) < 0.01
        assert 8 * max(bandwidths) < 1.15 * rate
        assert 8 * max(bandwidths) > 0.85 * rate  # on a faster one the cores decide as well
        assert max(bandwidths) > 0.8 * max(achieved)
