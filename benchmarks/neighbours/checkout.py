"""Modules of a checkout, imported as they are but for two things.

What they import and do not compute with (torchvision, plots, logs) is replaced by stand-ins. And each file is read with
float64 in the place of float32, so that two ways to write the same formula differ by 1e-16 and not by 1e-7.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(root: Path, *names: str, absent: Iterable[str] = ()) -> list[ModuleType]:
    """The modules of these names below `root`. They are forgotten at once: other checkouts have the same names.

    `absent` are packages and modules that are replaced by stand-ins.
    """
    finder = _Finder(root, frozenset(absent))
    sys.meta_path.insert(0, finder)
    try:
        return [import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in finder.found & set(sys.modules):
            del sys.modules[name]


class _Anything:
    """Whatever a stand-in is asked for."""

    def __init__(self, *values: object, **named: object) -> None:
        pass

    def __getattr__(self, name: str) -> type:
        return _Anything


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Doubled(SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        return super().get_data(path).replace(b"float32", b"float64").replace(b"FloatTensor", b"DoubleTensor")

    def path_stats(self, path: str) -> dict:
        raise OSError("no byte code is read or written: it would be that of the file as it is")


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path, absent: frozenset[str]) -> None:
        self.root, self.absent, self.found = root, absent, set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        at = self.root.joinpath(*name.split("."))
        spec = None
        if name in self.absent or name.partition(".")[0] in self.absent:
            spec = ModuleSpec(name, self, is_package=True)
        elif (file := at / "__init__.py").exists():
            spec = spec_from_file_location(name, file, loader=_Doubled(name, str(file)), submodule_search_locations=[])
        elif (file := at.with_suffix(".py")).exists():
            spec = spec_from_file_location(name, file, loader=_Doubled(name, str(file)))
        elif at.is_dir():
            spec = ModuleSpec(name, None, is_package=True)
        if spec:
            self.found.add(name)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
