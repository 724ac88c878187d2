"""The two packages that Lightning comes as: `lightning`, and its mirror `pytorch_lightning`.

Their code is the same and their classes are not: neither Trainer takes a strategy of the other. What touches Lightning
here is written for `lightning`. From the same files, `lightning_lowbw.strategies` is built a second time, on
`pytorch_lightning`, as `lightning_lowbw.mirror`: as soon as `pytorch_lightning` is imported, and not before. Where only
`pytorch_lightning` is installed, all of it is built on that, and there is no mirror. What is built differs in the names
in import statements, which are replaced before a module is compiled.

A strategy becomes its twin when it is given to a Trainer of the other package, see `strategies.base`. A callback
is one class, with the `Callback` of both as bases. Errors, methods and all that does not touch Lightning exist once.
"""

from __future__ import annotations

import ast
import importlib
import sys
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from itertools import chain
from types import CodeType, ModuleType
from typing import Any, TypeVar

OLDEST = (2, 4)  # release of pytorch_lightning; of lightning pip takes care
STRATEGIES, MIRROR = "lightning_lowbw.strategies", "lightning_lowbw.mirror"
LIGHTNING, PYTORCH_LIGHTNING = "lightning", "pytorch_lightning"
MODULES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
PACKAGES = {"lightning": LIGHTNING, "pytorch_lightning": PYTORCH_LIGHTNING, "lightning_fabric": PYTORCH_LIGHTNING}
# What imports Lightning, and is built on pytorch_lightning where that is all there is.
ADAPTERS = tuple(f"lightning_lowbw.{name}" for name in ("strategies", "callbacks", "tools", "cli"))

T = TypeVar("T")


def twins(cls: type[T]) -> tuple[type[T], ...]:
    """Return a class with its twin in the other package, if that has been imported; for `isinstance`.

    Args:
        cls: a class of Lightning, or a strategy of this package.
    """
    names = {**MODULES, STRATEGIES: MIRROR}
    module = _renamed(cls.__module__, {**names, **{new: old for old, new in names.items()}})
    twin = getattr(sys.modules.get(module), cls.__name__, None)
    return (cls,) if twin is None or twin is cls else (cls, twin)


def package_of(thing: object) -> str | None:
    """Return the package that an object's class, or a base of it, belongs to; None where it is none of Lightning's."""
    roots = (cls.__module__.partition(".")[0] for cls in type(thing).__mro__)
    return next((PACKAGES[root] for root in roots if root in PACKAGES), None)


def connect(callbacks: Sequence[type]) -> None:
    """Let `pytorch_lightning` know the strategies and callbacks: now, or when it is imported.

    Args:
        callbacks: the callbacks of this package.
    """
    _finder.callbacks = callbacks
    if sys.modules.get(PYTORCH_LIGHTNING) is not None:
        _finder.connect()


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

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == MIRROR:
            _finder.introduce(module)


class _ThenConnecting(Loader):
    """Loads `pytorch_lightning` as it would be loaded otherwise, and then connects it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _finder.connect()

    def __getattr__(self, name: str) -> Any:  # what the spec is asked for, if the package is not imported
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """Finds the modules that are built on `pytorch_lightning`, and notices when that is imported.

    Attributes:
        callbacks: those of this package; None until all of it is imported.
        is_alone: whether `lightning` is not installed.
    """

    def __init__(self) -> None:
        self.callbacks: Sequence[type] | None = None
        self.is_alone = not _is_installed(LIGHTNING)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self.is_alone:
            is_ours = any(_renamed(fullname, {name: ""}) != fullname for name in ADAPTERS)
            return self._spec(fullname, fullname, path, MODULES) if is_ours else None
        if fullname == PYTORCH_LIGHTNING:
            return self._spec_of_package(fullname, path, target)
        source = _renamed(fullname, {MIRROR: STRATEGIES})
        return None if source == fullname else self._spec(fullname, source, path, {**MODULES, STRATEGIES: MIRROR})

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
            spec.loader = _ThenConnecting(spec.loader)
        return spec

    def connect(self) -> None:
        """Build the mirror, which ends in `introduce`, once all of this package is imported."""
        if self.callbacks is None or self.is_alone:
            return
        version: str = sys.modules[PYTORCH_LIGHTNING].__version__
        if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
            return  # such a Trainer does not know the strategies
        importlib.import_module(MIRROR)

    def introduce(self, mirror: ModuleType) -> None:
        """Make the mirror's strategies known by name, and each package's classes known to the other."""
        mirror.register()
        strategies = sys.modules[STRATEGIES]
        for name in ("Strategy", "ShardedStrategy"):  # which become their twins in a Trainer
            getattr(mirror, name).__base__.register(getattr(strategies, name))
        for name in mirror.__all__:
            if isinstance(own := getattr(strategies, name), ABCMeta):
                own.register(getattr(mirror, name))
        for callback in self.callbacks or ():
            callback.__bases__ = tuple(dict.fromkeys(chain.from_iterable(map(twins, callback.__bases__))))


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # else a folder of this name


_finder = _Finder()
# Its lines are shown where Lightning's are.
LOGGER = f"{PYTORCH_LIGHTNING if _finder.is_alone else 'lightning.pytorch'}.lightning_lowbw"
if _is_installed(PYTORCH_LIGHTNING):
    sys.meta_path.insert(0, _finder)
