"""`lowbw-plan`: the time of a step with each method on a cluster, by the cost model, and the method to use."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_lowbw import cli
from lightning_lowbw.arguments import check_one_of, is_count, is_number
from lightning_lowbw.comm.link import Link
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.cost_model import (
    CANDIDATES,
    FAST,
    HALF_DDP,
    Cluster,
    Cost,
    Measured,
    Run,
    Shapes,
    choose,
    cost_of,
    ms,
    number,
    predict,
)
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.params import small_numel
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.presets import preset
from lightning_lowbw.schedules.every_step import EveryStep

SIDE = 1024  # of the matrices that stand for a model if only its number of parameters is known
EVERY_K = ("local_sgd", "hidden_local_sgd", "diloco", "streaming_diloco", "sparse_loco")
FLAT = ("ddp", HALF_DDP, "float16", "int8", "int4", "powersgd", "dgc", *EVERY_K)
BUDGET = EveryStep().budget
HEADS, WIDTHS = ("s per step", "MB sent / node", "MB kept / rank", "x bfloat16"), (11, 16, 16, 12)
LEVELS = "_hierarchical"
ON_TWO_LEVELS = ("hierarchical", *(each + LEVELS for each in FLAT[2:]))
# As in conf/plan.yaml.
CLUSTER = ("nodes", "ranks_per_node", "gbit_per_s", "latency_ms", "inside_gbit_per_s", "memory_gbyte_per_s", "overlap")
COUNTS = CLUSTER[:2]


@dataclass(frozen=True)
class Plan:
    """A training that is planned.

    Args:
        shapes: the shapes of the trained tensors.
        cluster: the nodes and links.
        step_s: seconds of a step without communication.
        run: its length, its optimizer, and whether weights are trained already.
    """

    shapes: Shapes
    cluster: Cluster
    step_s: float
    run: Run

    def predicted(self, name: str) -> tuple[Cost, float] | None:
        """Return the cost of a name for `Trainer(strategy=...)` (of dgc after its warm-up), and the seconds of a step.

        The seconds are the mean of the run. None: the run is too short for the method.
        """
        base, topology = name.removesuffix(LEVELS), "auto" if name.endswith(LEVELS) else None
        if base == "dgc":
            given = _given(topology or "flat")
            # By this name dense steps are in float32: bfloat16 is no candidate.
            found = CANDIDATES["dgc"](self._predicted(given).of(("ddp", "dgc")), self.run, given)
            if isinstance(found, str):
                return None
            return cost_of(found.method, self.shapes, self.cluster, self.step_s), found.mean_s
        method = Method() if base == "ddp" else preset(base).at(topology)
        cost = cost_of(method, self.shapes, self.cluster, self.step_s)
        return cost, self.step_s + cost.seconds

    def _predicted(self, given: Method) -> Measured:
        small = small_numel([*map(math.prod, self.shapes)])
        sparse = [shape for shape in self.shapes if given.what.compresses("", math.prod(shape), small)]
        others = [shape for shape in self.shapes if shape not in sparse]
        return predict(sparse, others, self.cluster, self.step_s, given)

    def names(self) -> tuple[str, ...]:
        """Return the methods of the table."""
        return FLAT + ON_TWO_LEVELS * (min(self.cluster.num_nodes, self.cluster.ranks_per_node) > 1)

    def recommended(self) -> tuple[str, str]:
        """Return the name of the strategy to use, and why.

        It is what `strategy="lowbw"` would choose, flat or on two levels, with the sentence that it would log.
        """
        found = []
        for ending in ("", LEVELS) if ON_TWO_LEVELS[0] in self.names() else ("",):
            given = _given("auto" if ending else "flat")
            chosen, sentence = choose(self._predicted(given), self.run, given, (*CANDIDATES,), {})
            name = chosen.name if chosen.name in ("ddp", "hierarchical") else f"{chosen.name}{ending}"
            found.append((name, chosen.mean_s, sentence))
        most_s = (1.0 + BUDGET) * min(mean_s for _, mean_s, _ in found)
        as_fast = [(name, sentence) for name, mean_s, sentence in found if mean_s <= most_s]
        # DDP changes nothing; otherwise two levels, which send less between nodes, and divide work and memory.
        return as_fast[0 if as_fast[0][0] == "ddp" else -1]

    def text(self) -> str:
        """Return a table, and what to use."""
        cluster, link = self.cluster, self.cluster.link
        numel = sum(map(math.prod, self.shapes))
        setting = (
            f"{number(numel / 1e6)}M parameters, {cluster.num_nodes} nodes x "
            f"{cluster.ranks_per_node} ranks, {number(link.bandwidth_bytes_per_s * 8e-9)} Gb/s, latency "
            f"{ms(link.latency_s)}, {ms(self.step_s)} a step without communication"
        )
        lines = [_wrapped(setting), "", _row("method", *HEADS)]
        rows = {name: row for name in self.names() if (row := self.predicted(name)) is not None}
        for name, (cost, seconds) in rows.items():
            numbers = seconds, cost.node_bytes / 1e6, cost.memory_bytes / 1e6
            lines.append(_row(name, *map(number, numbers), f"{rows[HALF_DDP][1] / seconds:.2f}"))
        name, why = self.recommended()
        ending = LEVELS if name.endswith(ON_TWO_LEVELS[0]) else ""
        topology = ', topology="auto"' if ending else ""
        of_class = f"lowbw.AutoStrategy(pretrained=True{topology})"
        strategy = of_class if self.run.is_pretrained else f'"lowbw{ending}"'
        choosing = f"Trainer(strategy={strategy}), which measures and chooses: by this model {name}"
        advice = "stay with ddp" if name == "ddp" else choosing
        held_gb = number((16 if self.run.is_adam else 12) * numel / 1e9)  # float32; SGD with momentum
        of_memory = (
            f"A rank holds {held_gb} GB: trained parameters, gradients and the optimizer's state, besides what the "
            "table says is kept. If that does not fit, use int8_fsdp, over a WAN sparse_loco_fsdp."
        )
        said = map(_wrapped, (of_memory, f"Recommended: {advice}", f"Why: {why}."))
        return "\n".join([*lines, "", *said, ""])


def _row(name: str, *columns: str) -> str:
    return f"{name:29}" + "".join(f"{column:>{width}}" for column, width in zip(columns, WIDTHS, strict=True))


def _wrapped(line: str) -> str:
    # As wide as the table: words stay whole, so that code in the line can be copied.
    return textwrap.fill(line, 79, break_long_words=False, break_on_hyphens=False)


def _given(topology: str) -> Method:
    """Return what `strategy="lowbw"` begins with."""
    return Method(when=EveryStep(sparsity="auto", budget=BUDGET), what=TopK(), where=Where(topology=topology))


def make_cluster(numbers: Mapping[str, Any], *, begins_early: bool = True) -> Cluster:
    """Return a cluster of the numbers of `CLUSTER`, as users give them and `lowbw-check` writes them.

    Args:
        numbers: by name.
        begins_early: see `Cluster`.

    Raises:
        ConfigurationError: one is out of range.
    """
    for name in CLUSTER:
        value, is_free = numbers[name], name in ("latency_ms", "overlap")
        if name in COUNTS and not is_count(value):
            raise ConfigurationError(f"{name}={value!r}: give an integer >= 1.")
        if not is_number(value) or value < 0 or not (value or is_free):
            raise ConfigurationError(f"{name}={value!r}: give a number {'>=' if is_free else '>'} 0.")
    if numbers["overlap"] > 1:
        raise ConfigurationError(f"overlap={numbers['overlap']!r}: give a share of a step, from 0 to 1.")
    inside = replace(FAST, bandwidth_bytes_per_s=numbers["inside_gbit_per_s"] / 8e-9)
    link = Link(numbers["latency_ms"] * 1e-3, numbers["gbit_per_s"] / 8e-9)
    nodes, memory_bytes_per_s = (numbers["nodes"], numbers["ranks_per_node"]), numbers["memory_gbyte_per_s"] * 1e9
    return Cluster(*nodes, link, inside, memory_bytes_per_s, numbers["overlap"], begins_early)


def shapes_of(num_parameters: int) -> list[tuple[int, ...]]:
    """Return tensors with as many elements: square matrices, and a vector of the rest.

    Example:
        >>> shapes_of(2_500_000)
        [(1024, 1024), (1024, 1024), (402848,)]
    """
    # Matrices of a usual size: PowerSGD sends vectors whole.
    whole, rest = divmod(num_parameters, SIDE * SIDE)
    return [(SIDE, SIDE)] * whole + [(rest,)] * (rest > 0)


def measured(path: str) -> dict[str, Any]:
    """Return the numbers of `CLUSTER` from a file that `lowbw-check --out` has written.

    Raises:
        ConfigurationError: the file does not exist, or has no such numbers.
    """
    try:
        loaded: Any = OmegaConf.load(path)
        cluster = loaded["cluster"]
        return {name: cluster[name] for name in CLUSTER}
    except (OSError, KeyError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(f"link={path}: give a file that `lowbw-check --out FILE` has written.") from error


def show(config: DictConfig) -> None:
    """Print the table of the methods, and the method to use.

    Args:
        config: as composed from conf/plan.yaml.

    Raises:
        ConfigurationError: a setting is not allowed.
    """
    numbers = {name: config[name] for name in CLUSTER}
    if config.link is not None:
        found = measured(config.link)
        given = {each.partition("=")[0] for each in HydraConfig.get().overrides.task}
        numbers |= {name: value for name, value in found.items() if name not in given}
    for name in ("parameters", "step_s", "steps"):
        if not is_number(config[name]) or config[name] <= 0:
            raise ConfigurationError(f"{name}={config[name]!r}: give a number > 0, such as 25.6e6.")
    shapes = shapes_of(int(config.parameters))
    if config.model._target_ is not None:
        shapes = [tuple(each.shape) for each in instantiate(config.model).parameters() if each.requires_grad]
    check_one_of("optimizer", config.optimizer, ("sgd", "adam", "adamw"))
    run = Run(0, config.steps, config.pretrained, is_adam=config.optimizer != "sgd")
    cluster = make_cluster(numbers, begins_early=config.begins_early)
    sys.stdout.write(Plan(shapes, cluster, config.step_s, run).text())


def main() -> None:
    """Run `lowbw-plan`; its help is its configuration file, with the comments."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.stdout.write((cli.find_conf_dir() / "plan.yaml").read_text().partition("\ndefaults:")[0] + "\n")
        return
    names = [str(name) for name in OmegaConf.load(cli.find_conf_dir() / "plan.yaml") if name != "defaults"]
    for word in sys.argv[1:]:
        if "=" in word and re.split("[.=]", word)[0] not in names and word[0] not in "-+~":
            sys.exit(f"lowbw-plan: {word}: there is no such setting. Give some of {', '.join(names[:-1])}; see --help.")
    cli.run(_show_or_refuse, "plan")


def _show_or_refuse(config: DictConfig) -> None:
    # Hydra prints the traceback of an exception, too.
    try:
        show(config)
    except ConfigurationError as error:
        sys.exit(f"lowbw-plan: {error}")
