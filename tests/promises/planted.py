"""How promises are tested: each has a check, which must pass on the product and must fail on one that breaks it.

A fault is a change of the product that breaks one promise: a function that plants it by monkeypatch. A check says what
is wrong by an assertion; a product that fails in another way has not been understood.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

SHORT_S = 0.3  # the timeout of a product that is meant to wait in vain
Fault = Callable[[pytest.MonkeyPatch], None]


def assert_noticed(check: Callable[[], None], fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the fault; the check must object."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def faults(*planted: Fault) -> pytest.MarkDecorator:
    """Parametrize a test by faults, each named by its function."""
    return pytest.mark.parametrize("fault", planted, ids=lambda fault: fault.__name__)
