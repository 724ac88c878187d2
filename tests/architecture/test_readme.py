"""The numbers of the README are those that the benchmarks have written."""

from __future__ import annotations

import json
import math
import re

import pytest

from benchmarks.slow_link import Cell
from lightning_lowbw import Compression
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.elastic.site import ROUND_BYTES
from lightning_lowbw.payloads.quantized import FORMATS
from tests.programs import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
DIGITS, TEXT = "| digits, RMSprop | 300 | int4 |", "| text | 300 | int4 |"
CONTINUED = "| continued | sparse_loco, k = 16 |"


def cell(table: str, row: str, column: str) -> float:
    """Return the number in the last column of this name, in the first row that begins so."""
    lines = [line.split(" | ") for line in (RESULTS / table).read_text().splitlines()]
    number = next(len(line) - 1 - line[::-1].index(column) for line in lines if column in line)
    text = next(line for line in lines if " | ".join(line).startswith(row))[number]
    return float(text.split()[0].rstrip("%"))


def test_what_a_training_on_a_gpu_takes_more() -> None:
    trainings = json.loads((RESULTS / "gpu.json").read_text())["rows"]["training"].values()
    ms = [{name: median for name, (median, _) in row["ms per batch"].items()} for row in trainings]
    more = [[each[name] - each["alone"] for each in ms if name in each] for name in ("dgc", "int8", "powersgd")]
    dgc, int8, powersgd = (f"{math.floor(min(of))} to {math.ceil(max(of))}" for of in more)
    alone = [each["alone"] for each in ms]
    least, most = min(alone), max(alone)
    text = " ".join(README.split())
    assert f"`dgc` at 0.1 % adds {dgc} ms to a batch of {least:.0f} to {most:.0f} ms, `int8` {int8} ms." in text
    plan = " ".join((ROOT / "docs/quick_start.md").read_text().split())
    assert f"{int8} ms longer with `int8`, {dgc} with `dgc` at 0.1 %, on an H100 {powersgd} with `powersgd`" in plan
    assert f"a batch takes [{powersgd} ms longer]" in " ".join((ROOT / "docs/methods/powersgd.md").read_text().split())


def test_steps_of_many_nodes() -> None:
    cells = [Cell(**each) for each in json.loads((RESULTS / "emulated.json").read_text())["cells"]]
    cells = [each for each in cells if each.rate == "1gbit" and each.ranks_per_node == 1]
    step_s = {(each.num_nodes, each.method): each.median_s for each in cells}
    ratios = [step_s[num_nodes, "ddp"] / step_s[num_nodes, "dgc"] for num_nodes in (2, 4, 8)]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as ddp" in README


def test_the_accuracy_of_what_is_chosen() -> None:
    """As benchmarks/auto.py has written it."""
    page = " ".join((ROOT / "docs/methods/dgc.md").read_text().split())
    within = r"of these 9: within one standard error \(SE\) of ddp's in \d+, better in \d, worse in (\d)"
    loss, accuracy = re.findall(within, page)
    errors = sorted(re.findall(r"by ([\d.]+) SE", page))
    assert (loss, accuracy) == ("0", str(len(errors)))
    loss_is = "the loss is never worse by more than a standard error"
    shown = f"{loss_is}, the accuracy in {accuracy}, by {' and '.join(errors)} standard errors"
    assert shown in README


def test_what_is_sent() -> None:
    """As the README's own table has it, which benchmarks/headline.py writes."""
    rows = [line for line in README.splitlines() if line.startswith("| ") and "b/s, " in line]
    long, short = ([row for row in rows if ("5,000 steps" in row) is is_long] for is_long in (True, False))
    sent, least = (sorted(map(float, re.findall(r"dgc, ([\d.]+) %", " ".join(kind)))) for kind in (short, long))
    assert f"({sent[0]:.0f} to {sent[-1]:.0f} % sent, in 5,000 steps {least[0]} %)" in README


def test_it_is_one_page() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize(("row", "parameters"), [("40M", 40e6), ("100M", 100e6), ("350M", 350e6), ("7B", 7e9)])
def test_seconds_of_a_dense_exchange(row: str, parameters: float) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    shown = [float(cell.strip().removesuffix(" s").replace(",", "")) for cell in line.split("|")[2:5]]
    ranks_and_rates = ((4, 1e10), (4, 1e9), (2, 2e8))
    expected = [all_reduce_bytes(int(4 * parameters), ranks) * 8 / rate for ranks, rate in ranks_and_rates]
    assert shown == pytest.approx(expected, rel=0.02)
    longer = [all_reduce_bytes(1 << 30, 1 << 16) / all_reduce_bytes(1 << 30, ranks) for ranks in (4, 2)]
    assert longer == pytest.approx([4 / 3, 2], rel=0.01), "up to a third longer, up to twice as long"


def test_the_seconds_of_two_sites() -> None:
    """7B parameters at 200 Mb/s, one rank per site."""
    page, numel = " ".join((ROOT / "docs/wan.md").read_text().split()), 7_000_000_000
    sparse = Compression().nbytes([1 << 20]) * numel / (1 << 20)
    int8 = FORMATS["int8"].nbytes(numel)
    sparse_s, int8_s, model_s = (8 * nbytes / 2e8 for nbytes in (sparse, int8, 4 * numel))
    assert f"sends {sparse / 1e6:.0f} MB to the other site every 15 steps ({sparse_s:.1f} s)" in page
    assert f"would send {int8 / 1e9:.1f} GB in each step ({int8_s:.0f} s)" in page
    assert f"in float32 {model_s / 60:.0f} minutes, without output" in page
    dense = all_reduce_bytes(4 * numel, 2)
    cells = (
        [f"{ROUND_BYTES * numel / 1e9:.0f} GB; {ROUND_BYTES * numel / 2e9:.0f} GB"] * 2,
        [
            f"{sparse / 1e6:.0f} MB, {sparse_s:.1f} s; every 15 steps",
            f"{dense / 1e9:.0f} GB, {dense / 25e6:,.0f} s; every 100 steps",
        ],
        [f"{nbytes / 1e9:.0f} GB, {nbytes / 25e6:,.0f} s" for nbytes in (4 * numel, 8 * numel)],
    )
    assert all(f"| {' | '.join(row)} |" in (ROOT / "docs/elastic.md").read_text() for row in cells)


def test_memory_in_a_step() -> None:
    """As measured on a GPU."""
    rows = [line.strip("| ").split(" | ") for line in (RESULTS / "gpu.md").read_text().splitlines()]
    measured = {row[0]: float(row[2]) for row in rows if row[0].endswith((", 100M", ", 1B"))}
    page = [line.strip("| ").split(" | ") for line in (ROOT / "docs/behaviour.md").read_text().splitlines()]
    shown = {row[0]: row[3:] for row in page if len(row) == 5}
    names = {
        "`bfloat16`": "bfloat16",
        "`dgc` (large tensors), sending 0.1 %": "dgc",
        "`dgc`, sending 25 %": "dgc at 25 %",
        "`int8` (`float16` between steps, too)": "int8",
        "`int4`": "int4",
        "`sparse_loco`, local SGD with a `compression`": "sparse_loco",
    }
    for row, name in names.items():
        assert shown[row] == [f"{measured[f'{name}, {size}']:.1f}" for size in ("100M", "1B")], row
    least, most = min(measured.values()), max(measured.values())
    text = f"In a step {least:.1f} to {most:.1f} bytes come on top (H200; `dgc` {measured['dgc, 100M']:.1f} to "
    assert f"{text}{measured['dgc at 25 %, 100M']:.1f}, `int8` {measured['int8, 100M']:.1f})" in README


def test_the_versions_tried() -> None:
    page, pinned = (ROOT / "docs/quick_start.md").read_text(), (ROOT / "constraints.txt").read_text()
    torch, lightning = (re.findall(rf"^{name}==(\S+)", pinned, re.MULTILINE)[0] for name in ("torch", "lightning"))
    about = json.loads((RESULTS / "gpu.json").read_text())["environment"]
    minor, of_gpu = (version.rpartition(".")[0] for version in (torch, about["torch"]))
    assert f"on CPUs torch {minor} with Lightning {lightning}, on GPUs torch {of_gpu}" in page
    assert f"CUDA {about['cuda']}" in page


def test_how_far_predictions_are_off() -> None:
    ((num, good),) = re.findall(r"Of (\d+) predictions (\d+) are within 20 %", (RESULTS / "emulated.md").read_text())
    assert f"{good} of {num} predictions are within 20 %" in (ROOT / "docs/quick_start.md").read_text()


BY_DDP = cell("auto.md", "| text | 800 |", "test accuracy of ddp, %")


@pytest.mark.parametrize(
    ("row", "form", "value"),
    [
        ("`local_sgd`, every 8", "{:.1f} points", -cell("local_sgd.md", "| k = 8 |", "against k = 1")),
        ("`sparse_loco`", "{:+.1f} %", cell("bits_to_loss.md", CONTINUED, "to DDP")),
        ("`sparse_loco`", "scratch {:+.1f} %", cell("bits_to_loss.md", "| scratch | sparse_loco, k = 16 |", "to DDP")),
        ("`int4`", "{:.1f} points less", -cell("quantized_accuracy.md", DIGITS, "to DDP, points |")),
        ("`int4`", "{:.1f} more", cell("quantized_accuracy.md", TEXT, "to DDP, points |")),
        ("`int4`", "{:+.2f} % with RMSprop", cell("quantized_accuracy.md", DIGITS, "to DDP")),
        ("`dgc` that sends 0.1 %", "{:.1f} points", BY_DDP - cell("auto.md", "| text | 800 |", "dgc 99.9 %")),
    ],
)
def test_its_numbers(row: str, form: str, value: float) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    assert form.format(value) in line
