"""Keywords that a call does not take: answered with those it takes, and with the one that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from zcomm.errors import KeywordError

Known = TypeVar("Known", bound=Callable[..., Any])

_FOUR_BITS = ('codec="int4:64"', 'gradients="int4:64"', 'plan="int4:64"')
_MEANT = {  # other libraries' names, each with ours where the call has it
    "async_": ("async_op",),
    "bits": _FOUR_BITS,
    "block": _FOUR_BITS,
    "block_size": _FOUR_BITS,
    "codec": ("gradients", "plan"),
    "comm": ("group",),
    "compression": _FOUR_BITS,
    "dtype": ('codec="bf16"', 'gradients="bf16"', 'plan="bf16"'),
    "error_feedback": ("feedback",),
    "gpus_per_node": ("ranks_per_node",),
    "group_size": _FOUR_BITS,
    "local_size": ("ranks_per_node",),
    "momentum": ("beta",),
    "num_bits": _FOUR_BITS,
    "pg": ("group",),
    "process_group": ("group",),
    "reduce_op": ("op",),
    "reduction": ("op",),
    "timeout": ("timeout_s",),
}


def known_keywords(what: Known) -> Known:
    """A function that answers a keyword it does not take by KeywordError; a class whose public methods do, and whose
    construction does."""
    if not isinstance(what, type):
        return _answering(what, what.__name__)
    for name, method in vars(what).copy().items():
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(what, name, _answering(method, what.__name__ if name == "__init__" else name))
    return what


def _answering(function: Any, name: str) -> Any:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function
    names = tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name != "self"
    )
    known = frozenset(names)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not known.issuperset(kwargs):
            called = type(args[0]).__name__ if args and function.__name__ == "__init__" else name  # a subclass, say
            raise KeywordError(_complaint(called, names, next(each for each in kwargs if each not in known)))
        return function(*args, **kwargs)

    return call


def _complaint(called: str, names: tuple[str, ...], unknown: str) -> str:
    meant = [ours for ours in _MEANT.get(unknown, ()) if ours.partition("=")[0] in names]
    meant = meant or difflib.get_close_matches(unknown, names, n=1)
    hint = f", did you mean {meant[0]}" if meant else ""
    takes = ", ".join(names) if names else "no keyword at all"
    return f"{called}() takes no {unknown}={hint}; it takes {takes}"
