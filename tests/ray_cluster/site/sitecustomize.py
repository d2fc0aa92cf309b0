"""In Ray's processes of `Machines(forked=True)`: a unit starts `forked_node.py` in place of the command line.

Python imports this file at its start, from a directory of $PYTHONPATH.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

UNIT = "pd_cluster.launch.on_ray.unit"
PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "forked_node.py"))


class UnitFinder(MetaPathFinder):
    """Finds the module of units, and changes what they start once it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != UNIT:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            assert module._PROGRAM[1:] == ("-P", "-m", "pd_cluster.launch.cli")
            module._PROGRAM = PROGRAM

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, UnitFinder())
