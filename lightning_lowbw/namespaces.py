"""The two packages that Lightning comes as: `lightning`, and its mirror `pytorch_lightning`.

Their code is the same and their classes are not: a Trainer takes strategies and callbacks of its own package. The
adapters of this package are written for `lightning`. As soon as `pytorch_lightning` is imported, and not before, the
same files are loaded a second time, as `lightning_lowbw.mirror`, and the names of the strategies are registered there,
too. If only `pytorch_lightning` is installed, the adapters themselves are built on it. The two copies differ in the
names in import statements, which are replaced before a module is compiled.

An object of one package in a Trainer of the other is an error that names the class to import. Errors, methods and all
that does not touch Lightning exist once.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

PACKAGE, MIRROR = "lightning_lowbw", "lightning_lowbw.mirror"
LIGHTNING, PYTORCH_LIGHTNING = "lightning", "pytorch_lightning"
MODULES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
PACKAGES = {"lightning": LIGHTNING, "pytorch_lightning": PYTORCH_LIGHTNING, "lightning_fabric": PYTORCH_LIGHTNING}
# What imports Lightning, and is built on pytorch_lightning where that is all there is.
ADAPTERS = tuple(f"{PACKAGE}.{name}" for name in ("strategies", "callbacks", "tools", "cli"))
# The mirror has copies of two folders.
COPIES = {f"{PACKAGE}.{name}": f"{MIRROR}.{name}" for name in ("strategies", "callbacks")}


def package_of(thing: object) -> str | None:
    """Return the package of Lightning to which an object's class, or a base class, belongs; else None."""
    roots = (cls.__module__.partition(".")[0] for cls in type(thing).__mro__)
    return next((PACKAGES[root] for root in roots if root in PACKAGES), None)


def counterpart_of(thing: object, package: str) -> str:
    """Return the class of a package that takes the place of an object's class, or of its nearest base that has one.

    Args:
        thing: an object of the other package, or of a class that derives from one.
        package: `LIGHTNING` or `PYTORCH_LIGHTNING`.
    """
    cls = next(each for each in type(thing).__mro__ if each.__module__.partition(".")[0] in (PACKAGE, *PACKAGES))
    if cls.__module__.startswith(f"{PACKAGE}."):
        return f"{PACKAGE if package == LIGHTNING else MIRROR}.{cls.__name__}"
    names = MODULES if package == PYTORCH_LIGHTNING else {new: old for old, new in MODULES.items()}
    return f"{_renamed(cls.__module__, names)}.{cls.__name__}"


def connect() -> None:
    """Let `pytorch_lightning` know the strategies: now, or when it is imported."""
    _finder.is_ready = True
    if sys.modules.get(PYTORCH_LIGHTNING) is not None:
        _finder.connect()


def introduce(strategy: Any) -> None:
    """Let each Trainer accept strategies of the other package, which then name the class to import.

    Args:
        strategy: the common base of the mirror's strategies.
    """
    own: Any = sys.modules[f"{PACKAGE}.strategies.base"].BaseStrategy
    for cls, other in ((own, strategy), (strategy, own)):
        cls.__base__.register(other)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


class _Renaming(ast.NodeTransformer):
    """Replaces names of modules in import statements."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            alias.name = _renamed(alias.name, self._names)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        node.module = _renamed(node.module or "", self._names)
        return node


class _Loader(SourceFileLoader):
    """Loads a module from the source of this package, with other names in its import statements."""

    def __init__(self, fullname: str, path: str, names: Mapping[str, str]) -> None:
        super().__init__(fullname, path)
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        # Not the bytecode that is cached for the file: it has the names as they are written.
        tree = _Renaming(self._names).visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules that are built on `pytorch_lightning`, and notices when that is imported.

    Attributes:
        is_ready: whether all of this package is imported.
        is_alone: whether `lightning` is not installed.
    """

    def __init__(self) -> None:
        self.is_ready, self.is_alone = False, not _is_installed(LIGHTNING)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self.is_alone:
            is_ours = any(_renamed(fullname, {name: ""}) != fullname for name in ADAPTERS)
            return self._spec(fullname, fullname, path, MODULES) if is_ours else None
        if fullname == PYTORCH_LIGHTNING:
            return self._spec_of_package(fullname, path, target)
        if _renamed(fullname, {MIRROR: ""}) == fullname:
            return None
        source = _renamed(fullname, {copy: own for own, copy in COPIES.items()})
        path = sys.modules[source.rpartition(".")[0]].__path__
        return self._spec(fullname, source, path, {**MODULES, **COPIES})

    def _spec(self, fullname: str, source: str, path: Any, names: Mapping[str, str]) -> ModuleSpec | None:
        found = PathFinder.find_spec(source, path)
        if found is None or found.origin is None:
            return None
        loader, folders = _Loader(fullname, found.origin, names), found.submodule_search_locations
        return spec_from_file_location(fullname, found.origin, loader=loader, submodule_search_locations=folders)

    def _spec_of_package(self, fullname: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for each in others if (found := each.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_connect(module: ModuleType) -> None:
                execute(module)
                self.connect()

            spec.loader.exec_module = execute_and_connect  # type: ignore[method-assign]
        return spec

    def connect(self) -> None:
        """Build the mirror, which registers its strategies, once all of this package is imported."""
        if self.is_ready and not self.is_alone:
            importlib.import_module(MIRROR)


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # else a folder of this name


_finder = _Finder()
# Its lines are shown where Lightning's are.
LOGGER = f"{PYTORCH_LIGHTNING if _finder.is_alone else 'lightning.pytorch'}.lightning_lowbw"
if _is_installed(PYTORCH_LIGHTNING):
    sys.meta_path.insert(0, _finder)
