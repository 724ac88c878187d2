"""The numbers of the README and of the pages are those that the benchmarks have written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_lowbw import Compression
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.elastic.site import ROUND_BYTES
from lightning_lowbw.payloads.quantized import FORMATS
from lightning_lowbw.schedules.every_k import DEFAULT_OUTER_MOMENTUM
from tests.programs import ROOT

README = ROOT / "README.md"
TEXT = " ".join(README.read_text().split())
RESULTS = ROOT / "benchmarks" / "results"
CASES = "seconds per optimizer step"


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def rows(page: Path, head: str, section: str = "") -> Iterator[dict[str, str]]:
    """Yield the rows of all tables whose first column has this name; of columns with one name the first one counts."""
    columns: list[str] = []
    text = page.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0] if section else page.read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not columns and cells[:1] == [head]:
            columns = cells
        elif columns and not cells:
            columns = []
        elif columns and not cells[0].startswith("-"):
            last = {f"last of {name}": cell for name, cell in zip(columns, cells, strict=True)}
            yield last | {name: cells[columns.index(name)] for name in columns}


def number(text: str) -> float:
    return float(re.findall(r"[-+]?[\d.,]*\d", text)[0].replace(",", ""))


def span(values: list[float], form: str = ".1f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def test_it_is_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 90


def test_the_cases_are_predicted_or_measured() -> None:
    """By the plan on the page that a row links to, which tests/tools/test_plan.py compares; or in the lab."""
    kinds = []
    for case in rows(README, CASES):
        ((kind, link),) = re.findall(r"\[(predicted|measured)\]\((.*?)(?:#.*?)?\)", case["source"])
        kinds.append(kind)
        shown = {"ddp": case["`ddp`"], "bfloat16": case["`bfloat16`"]}
        shown |= {name: value for value, name in re.findall(r"([\d.]+)\**(?: at)? `(\w+)`", case["this package"])}
        assert len(shown) == 4
        if kind == "measured":
            (cells,) = ([each for each in rows(ROOT / link, "nodes x ranks") if each["nodes x ranks"] == "2 x 1"],)
            found = {each["method"]: each["1gbit, 0.5 ms: s per step"] for each in cells}
            found["bfloat16"] = found.pop("ddp + fp16")  # which sends as many bytes
            assert f"{found['no communication']} s of computation" in case[CASES]
        else:
            (block,) = re.findall("plan:begin -->\n```\n(.*?)```", (ROOT / link).read_text(), re.DOTALL)
            table = [line.split() for line in block.splitlines() if "." in line or line.endswith("0")]
            found = {line[0].removesuffix("_hierarchical"): line[1] for line in table}
        assert {name: number(value) for name, value in shown.items()} == {name: float(found[name]) for name in shown}
    assert kinds == ["predicted", "measured", "predicted", "predicted"]


def test_the_demo() -> None:
    ddp, dgc = rows(RESULTS / "demo.md", "strategy")
    for each, name in ((ddp, "DDP takes {} s (test accuracy {} %)"), (dgc, "`dgc` {} s ({} %)")):
        assert name.format(each["seconds"], each["test accuracy"].rstrip("%")) in TEXT


def test_the_pretrained_model() -> None:
    def of(section: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
        """Return the rows at the end of the runs, and the seconds, by methods."""
        found = [*rows(RESULTS / "finetune.md", "method", section)]
        return tuple({row["method"]: row for row in found if ("accuracy" in row) is is_end} for is_end in (True, False))

    (ends, times), (scratch, _) = of("MiniLM, all weights"), of("language model from scratch")
    shown = ("ddp", "int8", "dgc, 6.4 %")
    ddp_s, int8_s, dgc_s = (number(times[name]["s per step at 100 Mb/s, 50 ms"]) for name in shown)
    assert (
        f"DDP takes {ddp_s:.1f} s per step, `int8` {int8_s:.1f} s, `dgc` at 6.4 % (`sparsity=[0.936]`) {dgc_s:.1f} s."
        in TEXT
    )
    ddp, int8, dgc = (ends[name]["accuracy"].replace("%", " %") for name in shown)
    assert ends["ddp"]["seeds"] == ends["int8"]["seeds"] == ends["dgc, 6.4 %"]["seeds"] == "3"
    assert f"accuracy {ddp}, {int8} and {dgc} ([three seeds](benchmarks/results/finetune.md))" in TEXT
    (chosen,) = (name for name in ends if name.startswith("dgc, pretrained"))
    assert ends[chosen]["seeds"] == ends["sparse_loco"]["seeds"] == ends["sparse_loco, density 1/8"]["seeds"] == "2"
    ends = {name: number(row["points to ddp"]) for name, row in ends.items() if row["points to ddp"]}
    told = f"`pretrained=True`, 25.6 %: {-ends[chosen]:.1f} points lower (two seeds)"
    assert "25.6 %" in chosen
    assert told in TEXT
    adapters = of("MiniLM, LoRA of rank 8")[1]["int8"]
    slow, fast = (number(adapters[f"x ddp at {link}"]) for link in ("100 Mb/s, 50 ms", "1 Gb/s, 0.5 ms"))
    told = f"`int8` is {slow:.1f} times as fast as DDP at 100 Mb/s, {fast:.1f} times at 1 Gb/s"
    assert f"With 0.34M trained parameters {told}" in words("docs/wan.md")
    assert ends["int8"] >= 0.0 >= number(scratch["int8"]["loss to ddp"])  # "no loss seen"
    assert "nor with [10.8M and 22.6M](benchmarks/results/finetune.md)" in TEXT
    (loss,) = (number(row["loss to ddp"]) for name, row in scratch.items() if name.startswith("dgc"))
    assert f"[10.8M](benchmarks/results/finetune.md) from scratch: loss {-loss:.1f} % lower (one seed)" in TEXT
    few, often, dense = (ends[f"sparse_loco{more}"] for more in ("", ", k = 5", ", density 1/8"))
    told = f"has {-few:.1f} points less accuracy than DDP, with `k_steps=5` {-often:.1f} less (one seed)"
    assert f"{told}, with `density=1/8` {dense:.1f} more" in words("docs/methods/local_sgd.md")


def test_the_work_of_a_gpu() -> None:
    trainings = json.loads((RESULTS / "gpu.json").read_text())["rows"]["training"].values()
    ms = [{name: median for name, (median, _) in row["ms per batch"].items()} for row in trainings]

    def more(*names: str) -> str:
        found = [each[name] - each["alone"] for each in ms for name in names if name in each]
        return f"{math.floor(min(found))} to {math.ceil(max(found))}"

    alone = span([each["alone"] for each in ms], ".0f")
    dgc, int8, powersgd = more("dgc", "dgc at 25 %"), more("int8"), more("powersgd")
    assert f"a batch of {alone} ms takes {dgc} ms longer with `dgc`, {int8} ms with `int8`" in TEXT
    assert f"takes {dgc} ms longer with `dgc`, {int8} with `int8`, {powersgd} with `powersgd`" in words(
        "docs/quick_start.md"
    )
    assert f"a batch takes [{powersgd} ms longer]" in words("docs/methods/choose.md")


def test_hidden_averages() -> None:
    found = {row["method"]: row["s to ddp's loss"] for row in rows(RESULTS / "headline.md", "method")}
    hidden = next(seconds for name, seconds in found.items() if name.startswith("Hidden local SGD, 1.6"))
    assert f"at 100 Mb/s after {hidden} s, not {found['ddp']} s; one seed" in TEXT


def test_the_gain_of_small_models() -> None:
    gains: dict[bool, list[float]] = {True: [], False: []}
    for row in rows(RESULTS / "headline.md", "link"):
        if row["method"].startswith("lowbw"):
            gains[row["link"].startswith("100 Mb/s")].append(number(row["last of x ddp"]))
    assert f"{span(gains[True])} times as fast at 100 Mb/s, and only {span(gains[False])} times at 1 and 10" in TEXT
    found = [row for row in rows(RESULTS / "auto.md", "task") if "ddp / auto" in row]
    found = [row for row in found if (row["link"], row["steps"]) == ("1gbit", "5,000")]
    long = {row["task"]: number(row["ddp / auto"]) for row in found}
    large = long.pop("mlp-25M")
    gain = f"[{span([*long.values()])} times as fast](benchmarks/results/auto.md)"
    assert f"{gain}, with 25M parameters {large:.1f} times" in TEXT


def beside_ddp() -> list[dict[str, str]]:
    """Return the settings in which "auto" compresses."""
    found = [row for row in rows(RESULTS / "auto.md", "task") if "dgc 99.9 %" in row and "auto - ddp" in row]
    return [row for row in found if "all, as ddp" not in row["auto sends"]]


def test_the_accuracy_of_dgc() -> None:
    found = beside_ddp()
    points = max(number(row["ddp - auto, points"]) for row in found)
    assert f"[{len(found)} settings](benchmarks/results/auto.md)" in TEXT
    assert f"at most {points:.2f} points lower" in TEXT
    loss = [number(row["auto - ddp"]) / number(row["auto - ddp"].split("±")[1]) for row in found]
    assert max(loss) < 1, "the loss never worse by more than its standard error"
    lower = sorted({row["ddp - auto, points"].split()[0] for row in found if row["loss, accuracy"].endswith("worse")})
    page = words("docs/methods/dgc.md")
    assert f"lower in {len(lower)}, by {lower[1][1:]} and {lower[0][1:]} points" in page
    loss_is = [row["loss, accuracy"].split(",")[0] for row in found]
    assert f"(SE) of DDP's in {loss_is.count('within')} and better in {loss_is.count('better')}" in page
    (text,) = (row for row in found if (row["task"], row["steps"]) == ("text", "800"))
    lost = number(text["test accuracy of ddp, %"]) - number(text["last of dgc 99.9 %"])
    assert f"0.1 % from the first step cost {lost:.1f} points in 800 steps of a language model" in TEXT


def test_the_density_of_dgc() -> None:
    """The last one of a schedule: of the accuracy's settings, and of the headline."""
    of_length: dict[bool, list[float]] = {True: [], False: []}
    for row in beside_ddp():
        of_length[row["steps"] == "5,000"].append(float(re.findall(r"([\d.]+) %", row["auto sends"])[-1]))
    for row in rows(RESULTS / "headline.md", "seconds to ddp's loss"):
        for cell in (row["dgc"], row["lowbw"]):
            of_length["5,000 steps" in row["seconds to ddp's loss"]] += map(float, re.findall(r"dgc, ([\d.]+) %", cell))
    assert f"`dgc` sends {span(of_length[False], '.0f')} % of a gradient in runs of 300 to 800 steps" in TEXT
    assert f"{span(of_length[True])} % in 5,000" in TEXT


def test_the_accuracy_of_averages() -> None:
    table = rows(RESULTS / "bits_to_loss.md", "start")
    found = {(row["start"], row["method"]): row["to DDP"].partition(" %")[0] for row in table}
    sparse = [found[start, "sparse_loco, k = 16"] for start in ("continued", "scratch")]
    assert f"{sparse[0]} % from trained weights, {sparse[1]} % from scratch" in TEXT


def test_the_defaults_of_averages() -> None:
    """The outer optimizer and `sparse_loco`, by the loss to DDP's."""
    cells = [row for row in rows(RESULTS / "defaults.md", "task") if row["replicas"] and "AdamW" in row["task"]]
    by_name, paper = f"0.7 / {DEFAULT_OUTER_MOMENTUM['nesterov']}", "0.7 / 0.9"
    four = {(row["task"], row["k"], row["steps, to ddp's"]): row[by_name] for row in cells if row["replicas"] == "4"}
    scratch = "from scratch, AdamW"
    shown = f"{four['continued, AdamW', '16', '1']}]", f"{four[scratch, '16', '1']} from scratch"
    assert f"[{shown[0]}(benchmarks/results/defaults.md) from trained weights, {shown[1]}" in TEXT
    assert f"from scratch, {four[scratch, '16', '1.6']} after 1.6 times the steps" in TEXT
    assert f"by name, every 100 steps, {four[f'{scratch}, 1024 steps', '100', '1']} (one seed" in TEXT
    often = {
        outer: [number(r[outer]) for r in cells if (r["k"], r["steps, to ddp's"]) == ("16", "1")]
        for outer in (by_name, paper)
    }
    page = words("docs/methods/local_sgd.md")
    told = (
        f"is {span(often[paper])} % higher than DDP's with the paper's outer momentum of 0.9, {span(often[by_name])} %"
    )
    assert f"{told} with 0.6, the default, and with 1.6 times the steps no higher" in page
    assert all(number(row[by_name]) <= 0 for row in cells if row["steps, to ddp's"] == "1.6")
    keys = "k", "density", "dense steps first", "steps, to ddp's"
    table = rows(RESULTS / "defaults.md", "k")
    local = {tuple(row[key] for key in keys): number(row["loss, to ddp's"]) for row in table}
    plain, often_loss, longer = (
        local[k, "1/64", begin, steps]
        for k, begin, steps in (("15", "0%", "1"), ("4", "25%", "1"), ("15", "0%", "1.6"))
    )
    assert f"[+{longer} %](benchmarks/results/defaults.md) after 1.6 times the steps" in TEXT
    told = f"it loses {plain} %; {often_loss} % with k = 4 after a dense quarter, {longer} % with 1.6 times the steps"
    assert told in page


def test_the_goodput_of_groups() -> None:
    alone, sharded, from_file = rows(RESULTS / "elastic.md", "after a fault")
    one, two, restart = (row["steps"].replace("%", " %") for row in (alone, sharded, from_file))
    shown = f"{one} of the time in useful steps at 30 faults an hour, groups of two FSDP processes: {two}"
    assert f"{shown}; restarts from checkpoints {restart}" in TEXT
    page, (one_s, two_s) = words("docs/elastic.md"), (list(row.values())[-1] for row in (alone, sharded))
    assert f"{one} at 30 faults an hour with one process per group, {two} with two under FSDP" in page
    assert f"(a killed group is back after {two_s} s, not {one_s}), {restart} if all groups restart" in page
    faults = [row["faults, 30 an hour"] for row in (alone, sharded, from_file)]
    assert f"{faults[0]}, {faults[1]} and {faults[2]} faults" in page


def test_the_seconds_of_a_dense_exchange() -> None:
    seconds = [all_reduce_bytes(400_000_000, 4) * 8 / rate for rate in (1e10, 1e9)]
    told = f"for 100M parameters on 4 machines of one GPU {seconds[0]:.2g} s at 10 Gb/s, {seconds[1]:.2g} s at 1 Gb/s"
    assert told in words("docs/clusters.md")


def test_how_far_predictions_are_off() -> None:
    pages = {name: (RESULTS / f"{name}.md").read_text() for name in ("emulated", "plan_clock")}
    found = {name: re.findall(r"(\d+) of (\d+) predictions are within 20 %", page)[0] for name, page in pages.items()}
    told = [f"[{good} of {num}](benchmarks/results/{name}.md)" for name, (good, num) in found.items()]
    assert f"{told[0]} predictions for ResNet-50 and {told[1]} for MLPs of 25M to 100M parameters" in TEXT
    sums = [sum(map(int, each)) for each in zip(*found.values(), strict=True)]
    assert f"{sums[0]} of {sums[1]} predictions are within 20 %" in words("docs/quick_start.md")


def test_the_seconds_of_two_sites() -> None:
    """7B parameters at 200 Mb/s, one rank per site."""
    page, numel = words("docs/wan.md"), 7_000_000_000
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
    measured = {
        row["step"]: number(row["bytes per parameter at most"])
        for row in rows(RESULTS / "gpu.md", "step")
        if "bytes per parameter at most" in row
    }
    shown = {row["method"]: [row["in a step, 100M"], row["1B"]] for row in rows(ROOT / "docs/behaviour.md", "method")}
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
    column = "bytes of memory per trained parameter on each GPU"
    short = {row["strategy"]: row[column] for row in rows(README, "strategy")}

    def told(kept: int, *methods: str) -> str:
        more = span([measured[f"{name}, {size}"] for name in methods for size in ("100M", "1B")])
        return f"{kept}; during a step {more} more"

    assert short["`bfloat16`"] == told(0, "bfloat16")
    assert short["`int8`"] == told(4, "int8")
    assert short["`dgc`, as it chooses"] == told(4, "dgc", "dgc at 25 %")
    assert short["`sparse_loco`, every 16 steps"] == told(8, "sparse_loco")


def test_the_versions_tried() -> None:
    page, pinned = (ROOT / "docs/quick_start.md").read_text(), (ROOT / "constraints.txt").read_text()
    torch, lightning = (re.findall(rf"^{name}==(\S+)", pinned, re.MULTILINE)[0] for name in ("torch", "lightning"))
    about = json.loads((RESULTS / "gpu.json").read_text())["environment"]
    minor, of_gpu = (version.rpartition(".")[0] for version in (torch, about["torch"]))
    assert f"on CPUs torch {minor} with Lightning {lightning}, on GPUs torch {of_gpu}" in page
    assert f"CUDA {about['cuda']}" in page
    oldest = dict(re.findall(r'"(torch|lightning)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
    assert f"torch {oldest['torch']}, Lightning {oldest['lightning']} or newer" in TEXT


def test_the_published_projects() -> None:
    ((projects,),) = [re.findall(r"(\d+) projects, \d+ runs", (RESULTS / "compatibility.md").read_text())]
    assert f"in {projects} [published projects]" in TEXT


@pytest.mark.parametrize(("method", "tasks"), [("bfloat16", 2), ("int8", 3)])
def test_the_tasks_of_few_bits(method: str, tasks: int) -> None:
    found = [row for row in rows(RESULTS / "quantized_accuracy.md", "task") if row["method"] == method]
    assert len(found) == tasks
    assert all(abs(number(row["to DDP, points"])) <= 0.1 for row in found)
    assert f"| `{method}` | [no loss seen in {tasks} small tasks](benchmarks/results/quantized_accuracy.md)" in TEXT
