"""The numbers of the README are those that the benchmarks have written."""

from __future__ import annotations

import json
import math
import re

import pytest

from benchmarks.slow_link import Cell
from lightning_lowbw.comm.collectives import all_reduce_bytes
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
    assert f"a batch of {least:.0f} to {most:.0f} ms takes {dgc} ms longer with `dgc`, {int8} with `int8`." in text
    at_25 = [each["dgc at 25 %"] - each["alone"] for each in ms if "dgc at 25 %" in each]
    assert f"(`dgc` that sends 25 %: {math.floor(min(at_25))} to {math.ceil(max(at_25))}.)" in text
    plan = " ".join((ROOT / "docs/plan.md").read_text().split())
    assert f"{int8} ms longer with `int8`, {dgc} with `dgc`, on an H100 {powersgd} with `powersgd`" in plan


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
    shown = f"the loss is worse in none, the accuracy in {accuracy}, by {' and '.join(errors)} standard errors"
    assert shown in README


def test_what_is_sent_in_short_runs() -> None:
    """As the README's own table has it, which benchmarks/headline.py writes."""
    sent = [float(percent) for percent in re.findall(r"dgc, ([\d.]+) %", README)]
    assert f"({min(sent):.0f} to {max(sent):.0f} % sent in short runs)" in README


def test_it_is_one_page() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize(("row", "parameters"), [("40M", 40e6), ("100M", 100e6), ("350M", 350e6), ("7B", 7e9)])
def test_seconds_of_a_dense_exchange(row: str, parameters: float) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    shown = [float(cell.strip().removesuffix(" s").replace(",", "")) for cell in line.split("|")[2:5]]
    expected = [all_reduce_bytes(int(4 * parameters), 4) * 8 / rate for rate in (1e10, 1e9, 1e8)]
    assert shown == pytest.approx(expected, rel=0.02)


BY_DDP = cell("auto.md", "| text | 800 |", "test accuracy of ddp, %")


@pytest.mark.parametrize(
    ("row", "form", "value"),
    [
        ("`local_sgd`, every 8", "{:.1f} points", -cell("local_sgd.md", "| k = 8 |", "against k = 1")),
        ("`sparse_loco`", "{:+.1f} %", cell("bits_to_loss.md", CONTINUED, "to DDP")),
        ("`sparse_loco`", "scratch {:+.1f} %", cell("bits_to_loss.md", "| scratch | sparse_loco, k = 16 |", "to DDP")),
        ("`sparse_loco`", "{:.4f} bits", cell("bits_to_loss.md", CONTINUED, "bits per parameter and step")),
        ("`int4`", "{:.1f} points less", -cell("quantized_accuracy.md", DIGITS, "to DDP, points |")),
        ("`int4`", "{:.1f} more", cell("quantized_accuracy.md", TEXT, "to DDP, points |")),
        ("`int4`", "{:+.2f} % with RMSprop", cell("quantized_accuracy.md", DIGITS, "to DDP")),
        ("`dgc` that sends 0.1 %", "{:.1f} points", BY_DDP - cell("auto.md", "| text | 800 |", "dgc 99.9 %")),
    ],
)
def test_its_numbers(row: str, form: str, value: float) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row}"))
    assert form.format(value) in line
