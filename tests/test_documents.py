"""Every command, and every call of the package, in the documents is accepted; nothing is trained."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed import run as torchrun

import lightning_lowbw as lowbw
from lightning_lowbw import cli
from tests.programs import ROOT

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = ("compatibility", "lightning", "optimizers", "reliability")  # which have commands and names, too
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", *(ROOT / f"benchmarks/results/{name}.md" for name in WRITTEN)]
PROGRAMS = dict(re.findall('^(lowbw-[a-z]+) = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
MAKE = re.findall("^([a-z][a-z -]*):|^([A-Z]+) [?:]=|[(]([A-Z]+)[),]", (ROOT / "Makefile").read_text(), re.MULTILINE)
KNOWN = {*PROGRAMS, "make", "pip", "pytest", "python", "torchrun"}  # others' programs are not ours to check
PYTHON = re.compile(r"(lowbw|lightning_lowbw)\.\w+\(|(L\.)?Trainer\(")


def test_they_are_few_and_short() -> None:
    """As `wc -w` counts, without the generated table of keywords; for a new sentence another one goes."""
    assert len(GUIDES) <= 16
    texts = [re.sub("<!-- keywords:begin.*keywords:end -->", "", page.read_text(), flags=re.DOTALL) for page in GUIDES]
    assert sum(len(text.split()) for text in texts) <= 13_000


# What people search for; each of these leads to a sentence: supported, not supported or not tried.
SEARCHED = (
    *("bf16-mixed", "16-mixed", "gradient clipping", "torch.compile", "learning rate", "spot", "preemption", "vanish"),
    *("monitoring", "firewall", "4090", "consumer GPU", "QLoRA", "bitsandbytes", "webdataset", "Ray", "Kubernetes"),
    *("Hugging Face", "accelerate", "SLURM", "DeepSpeed", "NVLink", "InfiniBand", "MTU", "VPN", "NAT"),
)


@pytest.mark.parametrize("words", SEARCHED)
def test_what_people_search_for_is_there(words: str) -> None:
    assert any(re.search(rf"\b{re.escape(words)}\b", page.read_text(), re.IGNORECASE) for page in GUIDES)


def blocks(page: Path, languages: str) -> Iterator[str]:
    yield from re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def spans(page: Path) -> Iterator[str]:
    text = re.sub("^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall("`([^`]+)`", text))


def commands(page: Path) -> Iterator[str]:
    lines = [line for block in blocks(page, "sh|bash") for line in block.replace("\\\n", "").splitlines()]
    for line in [*lines, *spans(page)]:
        words = line.split(" ")
        if words[0] in KNOWN and "..." not in words and not all(word[:2] == "--" for word in words[1:]):
            yield line


def given(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def accept(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Fail unless the program exists and takes these arguments; a launcher's command is looked at, too."""
    program, *arguments = words
    if program in ("lowbw-train", "lowbw-plan"):
        parsed = OverridesParser.create().parse_overrides(get_args_parser().parse_args(arguments).overrides)
        overrides = [
            f"{each.get_key_element()}={next(each.sweep_string_iterator())}"
            if each.is_sweep_override()
            else str(each.input_line)
            for each in parsed
        ]
        cli.register_resolvers()
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
            if program == "lowbw-plan":
                compose("plan", overrides)
            else:
                instantiate(compose("train", [*overrides, "output_dir=x"]).strategy, _convert_="all")
    elif program == "torchrun":
        options = torchrun.get_args_parser().parse_args(arguments)
        accept([*["python"] * (not options.no_python), options.training_script, *options.training_script_args], capsys)
    elif program in PROGRAMS:
        own, _, started = " ".join(arguments).partition(" -- ")
        module, _, function = PROGRAMS[program].partition(":")
        with pytest.raises(SystemExit):
            getattr(importlib.import_module(module), function)(["--help"])
        assert {*given(own.split())} <= {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}
        if started:
            accept(started.split(), capsys)
    elif program == "make":
        known = {name for row in MAKE for name in " ".join(row).split()}
        assert {word.partition("=")[0] for word in arguments} <= known
    elif program == "pytest":
        assert all(f'addoption("{each}"' in (ROOT / "tests/conftest.py").read_text() for each in given(arguments))
        assert (ROOT / arguments[0]).exists()
    elif program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert {*re.findall(r"\.\[(\w+)\]", arguments[-1])} <= {*extras}
    elif arguments[:1] == ["-m"]:
        assert find_spec(arguments[1]) is not None
    elif arguments and arguments[0] != "train.py":  # the reader's
        assert (ROOT / arguments[0]).exists()


@pytest.mark.parametrize("command", sorted({command for page in PAGES for command in commands(page)}))
def test_a_command_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    accept(shlex.split(command, comments=True), capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_and_keywords_exist(page: Path) -> None:
    """Whatever needs no name of the reader's is built; a block is parsed at least."""
    for code in [*blocks(page, "python"), *filter(PYTHON.match, spans(page))]:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.keyword) and node.arg == "strategy" and ast.unparse(node.value).startswith("'"):
                assert ast.literal_eval(node.value) in {"ddp", *StrategyRegistry.available_strategies()}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("lowbw", "lightning_lowbw"):
                free = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {"lowbw", "lightning_lowbw"}
                if not free and "..." not in ast.unparse(node):
                    eval(ast.unparse(node), {"lowbw": lowbw, "lightning_lowbw": lowbw})
