"""The time model, against numbers worked out by hand; and the link is measured in time, alike on all ranks."""

from __future__ import annotations

import os
import sys
import tempfile

import torch.distributed as dist

from lightning_lowbw.comm.link import Link, measure_link
from lightning_lowbw.tools.lab import Network, launch
from tests.programs import WITHOUT_LIGHTNING
from tests.ranks import on_ranks
from tests.sync.problem import everywhere, same_on_all
from tests.tools.lab.namespaces import needs_lab

RATE = 5e7  # on a faster link the cores decide as well
# Until a try is as it should be: other work on the machine, as that of other tests, only adds time.
PROBE = f"""{WITHOUT_LIGHTNING}
import os, time
import torch
import torch.distributed as dist
from lightning_lowbw.comm.link import measure_link
dist.init_process_group("gloo")
long, is_right = torch.zeros({RATE / 100:.0f}), False  # a third of a second
for _ in range(15):
    dist.barrier()
    started = time.monotonic()
    link = measure_link()
    took = time.monotonic() - started
    dist.barrier()
    started = time.monotonic()
    dist.all_reduce(long)
    achieved = 2 * (1 - 1 / dist.get_world_size()) * long.nbytes / (time.monotonic() - started)
    found = link.bandwidth_bytes_per_s
    tried = torch.tensor([took, link.latency_s, 8 * found / {RATE}, found / achieved])
    dist.broadcast(tried, 0)
    took, latency_s, of_rate, of_achieved = tried.tolist()
    print(took, latency_s, of_rate, of_achieved, flush=True)
    if is_right := took < 1.0 and latency_s < 0.01 and 0.85 < of_rate < 1.15 and of_achieved > 0.8:
        break
dist.barrier()
os._exit(not is_right)
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

    def test_the_bandwidth_of_a_shaped_link(self) -> None:
        with Network([RATE] * 3) as network, tempfile.TemporaryFile() as output:
            environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-c", PROBE]
            report = launch(network, command, environment=environment, timeout_s=60.0, output=output)
            output.seek(0)
            assert report.status == 0, output.read().decode()
