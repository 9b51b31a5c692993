"""`import zcomm.fsdp2` as a statement: it finds the module that the attribute `zcomm.fsdp2` is."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class SubmoduleFinder(MetaPathFinder, Loader):
    """Finder and loader of a package's attributes that are modules of another name (importlib's meta path)."""

    def __init__(self, package: str, submodules: Container[str]) -> None:
        self._package = package
        self._submodules = submodules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec where fullname is one of them."""
        package, _, submodule = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == self._package and submodule in self._submodules else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make one, which exec_module replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the attribute in the place of the module that Python made."""
        name = module.__name__
        sys.modules[name] = getattr(sys.modules[self._package], name.partition(".")[2])
