"""`lowbw-lab`: run a training script on throttled nodes of this machine.

    lowbw-lab --nodes 2 --inter 1gbit -- python train.py

The script needs no change. It is started once per rank, as torchrun would start it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from lightning_lowbw.tools.lab.launcher import MAX_S, Report, check_run, launch
from lightning_lowbw.tools.lab.namespaces import LabError
from lightning_lowbw.tools.lab.network import ENDING, MAX_NODES, Network, parse_rate


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run, report; return the exit status."""
    parser = argparse.ArgumentParser("lowbw-lab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default 2)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks that share a node's link (default 1)")
    parser.add_argument(
        "--inter", default="1gbit", help="rate of the links: 1gbit, 200mbit, unlimited; or one per node, with commas"
    )
    parser.add_argument("--rtt", type=float, default=0.0, metavar="MS", help="round-trip time between two nodes")
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="SECONDS:RATE",
        help="change all links during the run; may be given again",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the run after this time")
    parser.add_argument("--no-pin", action="store_true", help="do not divide the cores among the ranks")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command", help="the script, with arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give the command to run behind --, for instance: lowbw-lab --nodes 2 -- python train.py")
    if not 1 <= options.nodes <= MAX_NODES:
        parser.error(f"--nodes {options.nodes}: give a number from 1 to {MAX_NODES}")
    ending = [number for number in ENDING[1:] if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, _terminate) for number in ending}
    try:
        check_run(options.ranks_per_node, options.timeout)
        rates = _rates(options.inter, options.nodes)
        changes = [_change(text) for text in options.change]
        if options.report is not None:
            _check_report(options.report)
        with Network(rates, rtt_ms=options.rtt) as network:
            report = launch(
                network,
                command,
                ranks_per_node=options.ranks_per_node,
                pin=not options.no_pin,
                changes=changes,
                timeout_s=options.timeout,
            )
    except LabError as error:
        sys.stderr.write(f"lowbw-lab: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("lowbw-lab: interrupted; the ranks have ended, the network is gone.\n")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if report.timed_out:
        sys.stderr.write(f"lowbw-lab: the ranks did not end within {options.timeout:g} s; they have been ended.\n")
    sys.stderr.write(_describe(report))
    if options.report is not None:
        options.report.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report.status


def _rates(text: str, num_nodes: int) -> list[float | None]:
    rates = [parse_rate(part) for part in text.split(",")]
    if len(rates) == 1:
        rates *= num_nodes
    if len(rates) != num_nodes:
        raise LabError(f"--inter {text}: {len(rates)} rates for {num_nodes} nodes; give one, or one per node.")
    return rates


def _check_report(path: Path) -> None:
    """Before the run, whose numbers would be lost."""
    if path.is_dir():
        raise LabError(f"--report {path}: this is a folder; give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise LabError(f"--report {path}: there is no such folder; make it first.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise LabError(f"--report {path}: this may not be written here; give another file.")


def _change(text: str) -> tuple[float, float | None]:
    seconds, _, rate = text.partition(":")
    try:
        change = float(seconds), parse_rate(rate)
    except (ValueError, LabError) as error:
        raise LabError(f"--change {text}: give SECONDS:RATE, for instance 30:100mbit ({error}).") from error
    if not 0 <= change[0] <= MAX_S:
        raise LabError(f"--change {text}: give a time from 0 to {MAX_S:g}, in seconds after the start.")
    return change


def _describe(report: Report) -> str:
    lines = [f"lowbw-lab: {report.seconds:.1f} s, exit status {', '.join(map(str, report.exit_status))}"]
    for node, traffic in enumerate(report.traffic):
        sent, received = traffic.sent_bytes / 1e6, traffic.received_bytes / 1e6
        lines.append(f"  node {node}: {sent:.3f} MB sent, {received:.3f} MB received on its interface")
    return "\n".join([*lines, ""])


def _terminate(number: int, frame: object) -> None:
    raise KeyboardInterrupt
