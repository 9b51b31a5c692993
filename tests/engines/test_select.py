"""Which engine computes where."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcomm.engines import native, select
from zcomm.errors import EngineError


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that had no compiler."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for cached in (native._library, select.engine_named):
        cached.cache_clear()
    yield
    for cached in (native._library, select.engine_named):
        cached.cache_clear()


@pytest.mark.skipif(native.why_missing() is not None, reason="no native engine")
def test_the_cpu_gets_the_native_engine() -> None:
    assert select.engine_for("cpu").name == "native"
    assert select.engine_for("cpu") is select.engine_for("cpu")
    info = {engine.name: engine for engine in select.available()}
    assert info["native"].usable
    assert "portable" in info["native"].detail


def test_engines_can_be_asked_for_by_name() -> None:
    assert select.engine_named("reference").name == "reference"
    with pytest.raises(EngineError, match="no engine is named 'gpu'; known: native, reference, cuda"):
        select.engine_named("gpu")


def test_a_device_without_an_engine_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="no engine computes on 'xpu:0'"):
        select.engine_for("xpu:0")


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_reference_computes_which_is_said_once_and_info_says_why() -> None:
    select._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="computes with numpy, many times slower than it can: .*install g"):
        assert select.engine_for("cpu").name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select.engine_for("cpu").name == "reference"
    info = {engine.name: engine for engine in select.available()}
    assert not info["native"].usable
    assert "was not built; install g++ or clang++ and run pip install again" in info["native"].detail
    assert info["reference"].usable
    with pytest.raises(EngineError, match="was not built"):
        select.engine_named("native")


@pytest.mark.usefixtures("without_library")
def test_a_library_that_does_not_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"no library")
    found = importlib.util.spec_from_file_location("zcomm.engines._native", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)

    assert "does not load" in str(native.why_missing())
