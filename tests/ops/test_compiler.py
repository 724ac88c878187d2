"""What numba compiles is kept, and compiled again when any file that it was made of has changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lightning_lowbw.ops import compiler

pytestmark = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")

CALLER = """
from callee import FACTOR, shift

def compute(x):
    return shift(FACTOR * x)
"""
CALLEE = """
FACTOR = {factor}

def shift(x):
    return x + {shift}
"""


@pytest.fixture(autouse=True)
def _folder_found_anew() -> Iterator[None]:
    compiler._cache_folder.cache_clear()
    yield
    compiler._cache_folder.cache_clear()


def load(folder: Path, name: str) -> ModuleType:
    """Import a file without its bytecode, which would stay: the files change within a second."""
    module, path = ModuleType(name), folder / f"{name}.py"
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def compile_and_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Do what a new process would do that finds the two files, with what was compiled before."""
    compiler._cache_folder.cache_clear()
    callee = load(folder, "callee")
    monkeypatch.setitem(sys.modules, "callee", callee)
    caller = load(folder, "caller")
    compiler.register(callee.shift)
    return int(compiler.compile_kernel(caller.compute, "int64(int64)")(10))


def test_another_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    (tmp_path / "caller.py").write_text(CALLER)
    for factor, shift in ((1, 1), (1, 2), (3, 2)):
        (tmp_path / "callee.py").write_text(CALLEE.format(factor=factor, shift=shift))
        assert compile_and_call(tmp_path, monkeypatch) == 10 * factor + shift
    assert len(list((tmp_path / "__pycache__").glob("numba-*/**/*.nbc"))) == 3


def test_the_users_own_folder_for_numba_is_used_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compiler.import_numba().config
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "mine"))
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(factor=1, shift=5))
    assert compile_and_call(tmp_path, monkeypatch) == 15
    assert list((tmp_path / "mine").glob("numba-*/**/*.nbc"))
    assert str(tmp_path / "mine") == config.CACHE_DIR


def test_where_there_is_no_place_it_is_compiled_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiler.import_numba().config, "CACHE_DIR", str(tmp_path / "file" / "folder"))
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(factor=2, shift=5))
    assert compile_and_call(tmp_path, monkeypatch) == 25
    assert compiler._cache_folder() is None
