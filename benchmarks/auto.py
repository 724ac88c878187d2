"""`DGCStrategy(sparsity="auto")` beside ddp and dgc at a fixed 99.9 %: what is lost in accuracy, what is won in time.

    .venv/bin/python benchmarks/auto.py accuracy                     # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/auto.py accuracy --tasks digits --steps 100 --links 1gbit --seeds 0
    .venv/bin/python benchmarks/auto.py accuracy --constant LEAST_TIMES_SENT=100    # another rule; shares what is there
    .venv/bin/python benchmarks/auto.py wall-clock                   # in the lab; a quarter of an hour
    .venv/bin/python benchmarks/auto.py report                       # table and plot of what there is

accuracy: two ranks on loopback, a thread each. The link acts on accuracy through the schedule alone, so nothing is
throttled: the schedule is chosen by the package from nominal values, the same on every machine except the seconds of
computation, which are measured once and kept. Nominal is the link, 0.1 ms of latency, and that a dense step takes
computation and all-reduce one after the other. Links for which the same schedule is chosen share their runs.

wall-clock: two nodes in the lab, a core each, real links and real measuring. Seconds per step are measured of each
density that a run goes through; seconds of a run are computed from them and the schedule. With THP_MEM_ALLOC_ENABLE=1
torch, under all methods alike, makes large tensors of large pages; the environment of a row says so.

The GPT-2 cell needs `transformers`. Writes benchmarks/results/auto.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside_ddp.accuracy import CONTROL, METHODS, VARIANTS, constants_of, measure_accuracy, train_all
from benchmarks.beside_ddp.cells import cells_of
from benchmarks.beside_ddp.report import draw, report
from benchmarks.beside_ddp.tasks import LINKS, STEPS, TASKS, TIMED_TASKS
from benchmarks.beside_ddp.wall_clock import measure_wall_clock, sorted_records, time_all
from benchmarks.harness import RESULTS


def main() -> None:
    """Measure what is missing, then write table and plot."""
    if sys.argv[1:2] == ["rank"]:
        train_all(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["timed-rank"]:
        time_all(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "wall-clock", "report"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--timed-tasks", nargs="+", choices=TIMED_TASKS, default=list(TIMED_TASKS))
    parser.add_argument("--steps", nargs="+", type=int, choices=STEPS, default=list(STEPS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--methods", nargs="+", choices=["ddp", CONTROL, *VARIANTS], default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE", help="of cost_model.py")
    parser.add_argument("--name", default="auto", help="of the results")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    results: dict[str, Any] = {"nominal": {}, "choices": [], "rows": [], "wall_clock": [], "environments": []}
    if path.exists():
        results = json.loads(path.read_text())
    if options.part != "report":
        measure_part = {"accuracy": measure_accuracy, "wall-clock": measure_wall_clock}[options.part]
        measure_part(options, results, path)
        results = json.loads(path.read_text())
    constants = constants_of(options)
    text = report(results, constants)
    print(text)
    if constants:
        return
    path.with_suffix(".md").write_text(text)
    draw(cells_of(results, {}), sorted_records(results), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
