"""`lowbw-plan` and `lowbw-check`: the cost model against sent bytes and published measurements; the commands."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from lightning_lowbw import DGC, LocalSGD, Method, PowerSGD, QuantizedGradients, Topology, Where, cli
from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import (
    PASS_BYTES,
    READ_BYTES,
    SEARCH_BYTES,
    SENT_BYTES,
    WORK_BYTES,
    Cluster,
    Run,
    cost_of,
)
from lightning_lowbw.presets import preset
from lightning_lowbw.tools.check import OF_CPU, check_ranks, join_ranks, loopback_warning, slow, text
from lightning_lowbw.tools.plan import CLUSTER, Plan, main, make_cluster, shapes_of, show
from tests.programs import ROOT, forget_launcher, free_port, run_script
from tests.ranks import on_ranks, run_ranks
from tests.sync.problem import same_on_all

PAGE = ROOT / "docs/quick_start.md"
# Faster R-CNN on 2 nodes, TCP, as PaddlePaddle Fleet documents it: Gb/s, seconds per step of the dense training and of
# DGC. The 1.9 s between the first two dense rows are 0.9 ns for each bit: 66M elements; 0.034 s are hidden.
FLEET = {1.0: (2.45, 0.375), 10.0: (0.55, 0.375), 100.0: (0.3725, 0.375)}
FLEET_SHAPES = shapes_of(66_000_000)
FLEET_STEP_S, FLEET_OVERLAP = 0.3725, 0.09
WIDE: dict[str, Any] = {"value_dtype": "float32"}  # 32 bits of a value and a few of its position; Fleet sends 64


def fleet(gbit_per_s: float, num_nodes: int = 2) -> Cluster:
    return Cluster(
        num_nodes, 1, Link(0.0, gbit_per_s / 8e-9), memory_bytes_per_s=1e15, overlap=FLEET_OVERLAP, begins_early=True
    )


def step_s(method: Method, gbit_per_s: float, num_nodes: int = 2) -> float:
    return FLEET_STEP_S + cost_of(method, FLEET_SHAPES, fleet(gbit_per_s, num_nodes), FLEET_STEP_S).seconds


@pytest.mark.parametrize("gbit_per_s", FLEET)
def test_the_speed_ups_that_fleet_has_measured(gbit_per_s: float) -> None:
    dense_s, dgc_s = step_s(Method(), gbit_per_s), step_s(DGC(sparsity=[0.999], **WIDE), gbit_per_s)
    assert (dense_s, dgc_s) == pytest.approx(FLEET[gbit_per_s], rel=0.01)
    assert dense_s / dgc_s == pytest.approx(FLEET[gbit_per_s][0] / FLEET[gbit_per_s][1], rel=0.02)


def test_no_gain_at_100_gbit_per_s() -> None:
    def advice(gbit_per_s: float) -> str:
        return Plan(FLEET_SHAPES, fleet(gbit_per_s), FLEET_STEP_S, Run(0, 100_000)).recommended()[0]

    assert [advice(gbit_per_s) for gbit_per_s in FLEET] == ["dgc", "int8", "ddp"]


def test_all_gathers_gain_up_to_about_128_ranks() -> None:
    """With the first sparsity of the warm-up that Fleet advises."""
    method, gains = DGC(sparsity=[0.984375], **WIDE), []
    for num_nodes in (32, 64, 128, 1024):
        gains.append(step_s(Method(), 1.0, num_nodes) / step_s(method, 1.0, num_nodes) > 1.0)
    assert gains == [True, True, False, False]


SHAPES = [(256, 256)] * 4 + [(512, 512), (1000,), (7,)]
SPARSE = {"sparsity": [0.99], "min_numel": 4096}
METHODS = {
    "int8": QuantizedGradients(),
    "powersgd": PowerSGD(rank=2),
    "dgc": DGC(**SPARSE),
}
CONTROL_BYTES = 400  # of the status


def send(method: Method) -> float:
    peers = method.make_peers()
    named = [(str(number), torch.nn.Parameter(torch.randn(shape))) for number, shape in enumerate(SHAPES)]
    worker = method.make_synchronizer(torch.optim.SGD([each for _, each in named], lr=0.1), named, peers)
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    worker.exchange(applies=True)
    return peers.num_local_ranks * peers.ledger.of_slow_network[0]


@pytest.mark.parametrize(("name", "ranks_per_node"), [(name, 1) for name in METHODS] + [("int8", 2), ("dgc", 2)])
def test_the_bytes_are_those_of_the_ledger(name: str, ranks_per_node: int) -> None:
    method, cluster = METHODS[name].at("flat" if ranks_per_node == 1 else 2), Cluster(2, ranks_per_node, Link(0.0, 1.0))
    predicted = cost_of(method, SHAPES, cluster, 1.0).node_bytes
    assert run_ranks(send, 2 * ranks_per_node, method)[0] == pytest.approx(predicted, rel=0.02, abs=CONTROL_BYTES)


SLOW = Link(latency_s=1.0, bandwidth_bytes_per_s=1e18)
FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e18)
# For 1,000 elements: bytes of a node, and rounds without the hidden part.
ROUNDS: list[tuple[Method, Cluster, float, float]] = [
    (Method(), Cluster(4, 1, SLOW), 6000, 6),
    (Method(), Cluster(4, 1, SLOW, overlap=0.5), 6000, 6 - 0.5),
    (Method(where=Where(topology=2)), Cluster(2, 2, SLOW), 4000, 2),
    # All-to-all: 2 ranks, each with 500 bytes for 2 ranks elsewhere; a ring crosses once, with 3 x 500.
    (QuantizedGradients("float16"), Cluster(2, 2, SLOW, overlap=0.5), 2000 + 1500, 1 + 3),
    (LocalSGD(10), Cluster(4, 1, SLOW), 600, 6 / 10),
    (LocalSGD(10, delay_steps=1), Cluster(4, 1, SLOW), 600, (6 - 1) / 10),
    (Method(), Cluster(1, 4, Link(0.0, 1.0), inside=SLOW), 6000, 6),
]


@pytest.mark.parametrize(("method", "cluster", "node_bytes", "seconds"), ROUNDS)
def test_rounds_and_what_hides_them(method: Method, cluster: Cluster, node_bytes: float, seconds: float) -> None:
    cost = cost_of(method, [(1000,)], cluster, step_s=1.0)
    assert (cost.node_bytes, cost.seconds) == pytest.approx((node_bytes, seconds), rel=1e-3)


def test_an_average_and_each_sent_element_are_work_which_nothing_hides() -> None:
    memory_bytes_per_s, numel = OF_CPU["memory_gbyte_per_s"] * 1e9, 1 << 20

    def work_bytes(method: Method, num_nodes: int = 2, ranks_per_node: int = 1) -> float:
        cluster = Cluster(num_nodes, ranks_per_node, FREE, FREE, memory_bytes_per_s=memory_bytes_per_s)
        seconds = cost_of(method, [(1024, 1024)], cluster, step_s=1.0).seconds
        return seconds * method.when.k_steps * memory_bytes_per_s / numel

    # Each rank reads the messages of all others and its own; on two levels it selects its part alone.
    dgc = DGC(sparsity=[0.936])
    on_two_levels = replace(dgc, where=Where(topology=2))
    assert work_bytes(dgc) == pytest.approx(PASS_BYTES + 0.064 * (SENT_BYTES + 2 * READ_BYTES), rel=1e-3)
    assert work_bytes(dgc, 4) == pytest.approx(PASS_BYTES + 0.064 * (SENT_BYTES + 4 * READ_BYTES), rel=1e-3)
    of_parts = PASS_BYTES / 2 + 0.064 * (SENT_BYTES / 2 + 2 * READ_BYTES)
    assert work_bytes(on_two_levels, 2, 2) == pytest.approx(of_parts, rel=1e-3)
    of_averages = SEARCH_BYTES + (SENT_BYTES + 2 * READ_BYTES) / 64
    assert work_bytes(preset("sparse_loco")) == pytest.approx(of_averages, rel=1e-3)
    assert work_bytes(LocalSGD(8, delay_steps=7)) == pytest.approx(WORK_BYTES, rel=1e-3)
    page = (ROOT / "benchmarks/results/ops_cpu.md").read_text()

    def ns(share: str, steps: str) -> float:
        return sum(float(each) for each in re.findall(rf"^\| (?:{steps}), {share} \|  \| ([\d.]+)", page, re.M))

    for steps, nbytes in (("select|code", SENT_BYTES), ("read 2 messages|apply", 2 * READ_BYTES)):
        per_element = (ns("6.4%", steps) - ns("0.1%", steps)) / (0.064 - 0.001)
        assert per_element == pytest.approx(1e9 * nbytes / memory_bytes_per_s, rel=0.1)


def test_a_plain_loop_is_planned_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for begins_early in (True, False):
        given = {"nodes": 4, "ranks_per_node": 2, "begins_early": begins_early}
        show(OmegaConf.merge(OmegaConf.load(ROOT / "conf/plan.yaml"), given))
        table = capsys.readouterr().out.partition("A rank holds")[0].splitlines()
        rows.append({line.split()[0]: float(line.split()[1]) for line in table if re.match(r"\w+  +[\d.]+ ", line)})
    early, late = rows
    assert len(early) > 10
    assert {name for name in early if early[name] < late[name]} == {"int8", "int4", "float16"}
    assert {name for name in early if early[name] > late[name]} == set()


NUMBERS = dict(zip(CLUSTER, (2, 1, 10.0, 0.1, 200.0, 1000.0, 0.5), strict=True))


def test_half_types_are_enough_where_nothing_else_is_faster() -> None:
    plan = Plan(shapes_of(25_600_000), make_cluster({**NUMBERS, "nodes": 4}), 0.11, Run(0, 100_000))
    assert plan.recommended()[0] == "bfloat16"
    text = " ".join(plan.text().split())
    assert 'Trainer(strategy="lowbw"), which measures and chooses: by this model bfloat16' in text


def test_of_two_that_are_as_fast_the_one_on_two_levels() -> None:
    cluster = make_cluster({**NUMBERS, "nodes": 4, "ranks_per_node": 4, "inside_gbit_per_s": 100.0})
    plan = Plan(shapes_of(100_000_000), cluster, 0.3, Run(0, 100_000, is_adam=True))
    (_, flat_s), (_, hierarchical_s) = (plan.predicted(name) or (None, 0.0) for name in ("dgc", "dgc_hierarchical"))
    assert flat_s < hierarchical_s < 1.05 * flat_s
    assert plan.recommended()[0] == "dgc_hierarchical"
    assert 'Trainer(strategy="lowbw_hierarchical")' in plan.text()
    fine_tuned = replace(plan, run=replace(plan.run, is_pretrained=True)).text()
    assert 'Trainer(strategy=lowbw.AutoStrategy(pretrained=True, topology="auto"))' in " ".join(fine_tuned.split())


def test_what_would_be_slow_is_named() -> None:
    same = {"host": "a", "device": "cpu", "python": "3.11", "nccl": None, "cores": 1, "kernels": "compiled"}
    same |= dict.fromkeys(("lightning-lowbw", "torch", "lightning", "pytorch-lightning", "triton", "numba"), "1.0")
    first = {**same, "threads": 1, "interface": "eth0"}
    second = {**same, "threads": 2, "interface": "127.0.0.1", "torch": "2.0", "kernels": "numba is not installed"}
    pairs = {(0, 1): Link(0.01, 1e8), (0, 2): Link(0.01, 4e7), (1, 2): Link(0.01, 1e8)}
    found = [*slow(Topology(((0,), (1,), (2, 3))), [first, second, first, first], pairs, Link(0.01, 4e7))]
    words = ("nodes of 1, 1, 2 ranks", "torch differs between ranks: 1.0, 2.0", "plain torch, on 1 ranks: numba is not")
    words += (*["2 threads on 1 cores"] * 2, "interface 127.0.0.1", "nodes 0 and 2: less", "latency 10 ms")
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True)), found
    assert not [*slow(Topology(((0,), (1,))), [first, first], {(0, 1): pairs[0, 1]}, Link(1e-4, 1e8))]


@on_ranks()
def test_a_pair_of_nodes_is_measured() -> None:
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    report = same_on_all(check_ranks(torch.device("cpu")))
    assert (report["cluster"]["nodes"], report["cluster"]["ranks_per_node"]) == (2, 1)
    assert [pair["nodes"] for pair in report["pairs"]] == [[0, 1]]
    assert all(0 < rate < 1e4 for rate in (report["pairs"][0]["gbit_per_s"], report["cluster"]["gbit_per_s"]))
    assert report["ranks"][0]["torch"] == torch.__version__


@pytest.mark.parametrize(("found", "words"), [("127.0.1.1", "to 127.0.1.1, "), ("nowhere", "no address"), ("::2", "")])
def test_a_host_name_that_leads_to_loopback_is_told(found: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    resolve = partial(socket.getaddrinfo, found, None, flags=socket.AI_NUMERICHOST)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: resolve())
    said = loopback_warning()
    assert words in said
    assert ("GLOO_SOCKET_IFNAME" in said) == bool(words)


@on_ranks()
def test_srun_starts_ranks() -> None:
    rank = os.environ["RANK"]
    ports = [str(free_port())]
    dist.broadcast_object_list(ports)
    forget_launcher()
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "1"}
    of_rank = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": ports[0]}
    os.environ.update({**job, **of_rank})
    assert join_ranks().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (dist.get_rank(), dist.get_world_size()) == (int(rank), 2)


PROGRAM = """
from lightning_lowbw.tools.{} import main

main()
"""


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """The check on two ranks first; then plans read its file. The first plan is on the page."""
    for name in ("check", "plan"):
        (tmp_path / f"{name}.py").write_text(PROGRAM.format(name))
    page = PAGE.read_text()
    (command,) = re.findall("^ *lowbw-check (.*)", page, re.MULTILINE)
    shown = run_script(tmp_path, "check.py", *shlex.split(command), num_ranks=2)
    assert shown.startswith("1 nodes x 2 ranks, all at once: ")
    assert "Recommended: " in shown
    assert {*OmegaConf.load(tmp_path / "check.yaml").cluster} == {*CLUSTER}
    plans = re.findall("^lowbw-plan (.*)", page, re.MULTILINE)
    shown, of_file, _, usage = (run_script(tmp_path, "plan.py", *shlex.split(each)) for each in plans)
    rows = [*filter(None, page.split("<!-- plan:begin -->\n```\n")[1].split("```\n<!-- plan:end -->")[0].splitlines())]
    assert [line for line in shown.splitlines() if line in rows] == rows
    assert " 1 nodes x 2 ranks" in of_file
    assert usage.startswith("# lowbw-plan parameters=")
    assert {path.name for path in tmp_path.iterdir()} == {"check.py", "plan.py", "check.yaml"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("parameters=25.6M", "parameters='25.6M': give a number > 0, such as 25.6e6."),
        ("gbits=1", "gbits=1: there is no such setting. Give some of parameters, model, step_s"),
        ("link=nofile", "link=nofile: give a file that `lowbw-check --out FILE` has written."),
        ("steps=10", "nodes=None: give an integer >= 1."),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(word: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lowbw-plan", word])
    composed = OmegaConf.merge(OmegaConf.load(ROOT / "conf/plan.yaml"), OmegaConf.from_dotlist([word]))
    monkeypatch.setattr(cli, "run", lambda task, _: task(composed))
    with pytest.raises(SystemExit, match=re.escape(f"lowbw-plan: {told}")):
        main()


def test_one_rank_alone_has_no_link() -> None:
    found = {"cluster": {"nodes": 1, "ranks_per_node": 1}, "pairs": [], "ranks": [{"host": "a"}], "slow": []}
    assert text(found).splitlines()[0] == "1 nodes x 1 ranks: no link to measure"


@pytest.mark.parametrize("name", ["clusters", "wan"])
def test_the_rows_of_a_guide(name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text(PROGRAM.format("plan"))
    page = (ROOT / f"docs/{name}.md").read_text().replace("\\\n", "")
    (command,) = re.findall("^lowbw-plan (.*)", page, re.MULTILINE)
    rows = page.split("<!-- plan:begin -->\n```\n")[1].split("```\n<!-- plan:end -->")[0].splitlines()
    assert len(rows) > 3
    assert {*rows} <= {*run_script(tmp_path, "plan.py", *shlex.split(command)).splitlines()}
