"""Finds the versions of all ranks, the speed of the links, and slow settings. Start it as the training is started:

torchrun --nproc-per-node 4 ... --no-python lowbw-check --out check.yaml
srun lowbw-check --out check.yaml
lowbw-lab --nodes 2 --inter 1gbit -- lowbw-check --parameters 25e6 --step-s 0.2
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import OmegaConf

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.collectives import group_of
from lightning_lowbw.comm.link import Link, measure_link
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Topology, discover
from lightning_lowbw.cost_model import Run
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.presets import DGC
from lightning_lowbw.sync.kernels import what_fails
from lightning_lowbw.tools.plan import Plan, make_cluster, shapes_of

PACKAGES = ("lightning-lowbw", "torch", "lightning", "pytorch-lightning", "triton", "numba")
SAME = ("device", "python", *PACKAGES, "nccl")  # on all ranks, or the slowest or oldest decides
# Backward is two thirds of a step, and some time passes before the first bucket is full; a CPU that sends is busy.
OF_GPU = {"memory_gbyte_per_s": 1000.0, "overlap": 0.5}
OF_CPU = {"memory_gbyte_per_s": 8.0, "overlap": 0.0}
NUM_STEPS = 100_000  # the length of a run that is not given, as in conf/plan.yaml
SLOW_PAIR, LONG_LATENCY_S = 0.5, 0.005  # of the fastest pair; one way


def check_ranks(device: torch.device) -> dict[str, Any]:
    """Return plain values: the cluster as `plan.make_cluster` takes it, neighbouring nodes, the ranks, the warnings.

    Collective: all ranks, blocking.

    Args:
        device: of this rank.
    """
    topology = discover()
    ranks = gather(describe_rank(device), "descriptions")
    inside = measure_links([(node, node) for node in topology.nodes if len(node) > 1], device)
    pairs: dict[tuple[int, ...], Link] = {}
    # Neighbours, whose links a ring uses: each node with the next one, in two turns in which a node has one pair.
    for first in (0, 1):
        turn = [(node, node + 1) for node in range(first, topology.num_nodes - 1, 2)]
        pairs |= measure_links([(pair, tuple(topology.leaders[node] for node in pair)) for pair in turn], device)
    between = measure_links([((), topology.leaders)] if pairs else [], device)
    found_inside = min(inside.values(), key=_bandwidth, default=Link(0.0, 1e12))
    link = between.get((), found_inside)
    cluster = {
        "nodes": topology.num_nodes,
        "ranks_per_node": max(map(len, topology.nodes)),
        **_as_numbers(link),
        "inside_gbit_per_s": _as_numbers(found_inside)["gbit_per_s"],
        **(OF_GPU if device.type == "cuda" else OF_CPU),
    }
    shown = [{"nodes": [*pair], **_as_numbers(link)} for pair, link in sorted(pairs.items())]
    return {"cluster": cluster, "pairs": shown, "ranks": ranks, "slow": [*slow(topology, ranks, pairs, link)]}


def describe_rank(device: torch.device) -> dict[str, Any]:
    """Return the host, interface and device of this rank, and the versions of its packages."""
    is_cuda = device.type == "cuda"  # whose collectives are NCCL's, on an interface of its own setting
    return {
        "host": socket.gethostname(),
        "interface": os.environ.get("NCCL_SOCKET_IFNAME" if is_cuda else "GLOO_SOCKET_IFNAME") or address(),
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "compiler": next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None),
        "kernels": kernels_of(device),
    }


def kernels_of(device: torch.device) -> str:
    """Compile and try the kernels of `dgc` and `int8`; return why they fail, or "compiled"."""
    named = [("weight", torch.nn.Parameter(torch.zeros(1, device=device)))]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)
    worker = DGC().make_synchronizer(optimizer, named, Peers())
    return what_fails([worker], [worker.method.what, Quantized()], device) or "compiled"


def installed(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def address() -> str:
    """Return the address of this rank on the way to rank 0."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "unknown"


def measure_links(
    groups: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], device: torch.device
) -> dict[tuple[int, ...], Link]:
    """Return the link between the ranks of each group, under its key; all groups are measured at the same time.

    Collective: all ranks, blocking.

    Args:
        groups: keys, and ranks; no rank is in two groups.
        device: of this rank.
    """
    here: dict[tuple[int, ...], Link] = {}
    made = [(key, ranks, group_of(tuple(sorted(ranks)), "check")) for key, ranks in groups]
    for key, ranks, group in made:
        if dist.get_rank() in ranks:
            here[key] = measure_link(group, device)
    return {key: link for each in gather(here, "links") for key, link in each.items()}


def slow(
    topology: Topology, ranks: Sequence[Mapping[str, Any]], pairs: Mapping[tuple[int, ...], Link], link: Link
) -> Iterator[str]:
    """Yield a line for each thing that would be slow, or not run."""
    if topology.world_size == 1:
        yield "one rank alone has no link: start this as the training is started"
    if not topology.has_equal_nodes:
        yield f"nodes of {', '.join(str(len(node)) for node in topology.nodes)} ranks: most methods need equal ones"
    for name in SAME:
        if len(values := {str(each[name]) for each in ranks}) > 1:
            yield f"{name} differs between ranks: {', '.join(sorted(values))}"
    for reason in sorted({each["kernels"] for each in ranks} - {"compiled"}):
        yield f"dgc and int8 in plain torch, on {sum(each['kernels'] == reason for each in ranks)} ranks: {reason}"
    for node in topology.nodes:
        here, threads = ranks[node[0]], sum(ranks[rank]["threads"] for rank in node)
        if here["device"] == "cpu" and threads > here["cores"]:
            yield f"{here['host']}: {threads} threads on {here['cores']} cores; set OMP_NUM_THREADS"
    if not pairs:
        return
    if local := {each["interface"] for each in ranks if each["interface"].startswith(("lo", "127.", "docker"))}:
        yield f"interface {', '.join(sorted(local))} leads to no other node: set NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    most = max(map(_bandwidth, pairs.values()))
    for pair, each in sorted(pairs.items()):
        if _bandwidth(each) < SLOW_PAIR * most:
            yield f"nodes {pair[0]} and {pair[1]}: less than half of the bandwidth of the fastest pair"
    if link.latency_s > LONG_LATENCY_S:
        yield f"latency {link.latency_s * 1e3:.3g} ms: rings wait for it in each round; exchange every k steps instead"


def text(found: Mapping[str, Any]) -> str:
    """Return the results of `check_ranks` as a page; ranks with the same description share a line."""
    cluster = found["cluster"]
    lines = [f"{cluster['nodes']} nodes x {cluster['ranks_per_node']} ranks"]
    lines[0] += f", all at once: {_shown(cluster)}" if len(found["ranks"]) > 1 else ": no link to measure"
    has_both = found["pairs"] and cluster["ranks_per_node"] > 1
    lines[0] += f"; inside a node {cluster['inside_gbit_per_s']:g} Gb/s" if has_both else ""
    lines += [f"nodes {each['nodes'][0]} - {each['nodes'][1]}: {_shown(each)}" for each in found["pairs"]]
    by_description: dict[str, list[str]] = {}
    for rank, each in enumerate(found["ranks"]):
        description = ", ".join(f"{name} {value}" for name, value in each.items() if value is not None)
        by_description.setdefault(description, []).append(str(rank))
    lines += [f"ranks {', '.join(ranks)}: {description}" for description, ranks in by_description.items()]
    return "\n".join([*lines, *(f"slow: {each}" for each in found["slow"] or ["nothing found"]), ""])


def _bandwidth(link: Link) -> float:
    return link.bandwidth_bytes_per_s


def _as_numbers(link: Link) -> dict[str, float]:
    gbit_per_s, latency_ms = link.bandwidth_bytes_per_s * 8e-9, link.latency_s * 1e3
    return {"gbit_per_s": float(f"{gbit_per_s:.4g}"), "latency_ms": float(f"{latency_ms:.3g}")}


def _shown(numbers: Mapping[str, float]) -> str:
    return f"{numbers['gbit_per_s']:g} Gb/s, latency {numbers['latency_ms']:g} ms"


def main(arguments: list[str] | None = None) -> None:
    """Run `lowbw-check`."""
    parser = argparse.ArgumentParser(
        "lowbw-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", help="write the results, for lowbw-plan link=FILE")
    parser.add_argument("--parameters", type=float, metavar="N", help="of a model: say which strategy suits it")
    parser.add_argument("--step-s", type=float, default=0.2, metavar="S", help="seconds of a step alone (default 0.2)")
    options = parser.parse_args(arguments)
    found = check_ranks(join_ranks())
    if dist.get_rank() == 0:
        sys.stdout.write(text(found))
        if options.parameters is not None:
            shapes, cluster = shapes_of(int(options.parameters)), make_cluster(found["cluster"])
            sys.stdout.write("\n" + Plan(shapes, cluster, options.step_s, Run(0, NUM_STEPS)).text())
        if options.out is not None:
            OmegaConf.save(OmegaConf.create(found), options.out)
    dist.barrier()
    dist.destroy_process_group()


def join_ranks() -> torch.device:
    """Connect the processes that a launcher has started, or this one alone; return this rank's device."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values: tuple[Any, ...] = (0, 1, 0, "127.0.0.1", 0)
    if "RANK" not in os.environ and SLURMEnvironment.detect():
        slurm = SLURMEnvironment()
        values = slurm.global_rank(), slurm.world_size(), slurm.local_rank(), slurm.main_address, slurm.main_port
    for name, value in zip(names, values, strict=True):
        os.environ.setdefault(name, str(value))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif int(os.environ["WORLD_SIZE"]) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        sys.stderr.write(loopback_warning())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def loopback_warning() -> str:
    """Return a line about a host name that leads to this machine alone; empty if gloo can connect."""
    name, address = socket.gethostname(), "no address, so gloo takes 127.0.0.1"
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(name, None)[0][4][0])
        if not ipaddress.ip_address(address).is_loopback:
            return ""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    return (
        f"The host name {name!r} leads to {address}, which other machines cannot reach: set GLOO_SOCKET_IFNAME to the "
        "interface of the network, such as eth0 (ip -br addr lists them).\n"
    )
