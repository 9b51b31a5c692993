"""Calls that torch.compile leaves out of its graphs: it breaks its graph at them, and they run as they do without it.

Collectives post messages and wait for threads, which no graph can hold; zcomm.ops has forms that can stand in one. The
compiler reads a mark on the function, and must also be kept out of whatever the function calls. Importing it takes over
a second, so it is asked only where the program has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])

_WHY = "zcomm's calls cannot stand in a graph; zcomm.ops has all_gather, reduce_scatter and all_reduce that can"


def outside_graphs(what: Marked) -> Marked:
    """A function that torch.compile does not trace, nor anything that it calls; a class with such methods."""
    if not isinstance(what, type):
        return _unseen(what)
    for name, method in vars(what).copy().items():
        if callable(method) and not isinstance(method, type) and not name.startswith("_"):
            setattr(what, name, _unseen(method))
    return what


def _unseen(function: Any) -> Any:
    disabled: Any = None  # the function as the compiler disables it

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        compiler: Any = sys.modules.get("torch._dynamo")
        if compiler is None or not hasattr(compiler, "disable"):  # not imported, or not to its end
            return function(*args, **kwargs)
        if disabled is None:
            disabled = compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
    call._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    return call
