"""Links and latencies: what is read, and that what is printed is read back."""

from __future__ import annotations

import pytest

from zcomm.errors import ClusterError
from zcomm.tools.link import NO_LIMIT, Link, format_latency, parse_latency


@pytest.mark.parametrize(
    ("text", "bits_s"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("1.5gbit", 1_500_000_000),
        (".5mbit", 500_000),
        ("64kbit", 64_000),
        ("9600bit", 9600),
        (" 10 MBit ", 10_000_000),
    ],
)
def test_rates_are_decimal_bits(text: str, bits_s: int):
    assert Link.parse(text) == Link(bits_s)


def test_none_is_no_limit():
    assert Link.parse("none") == NO_LIMIT
    assert NO_LIMIT.bytes_s == float("inf")


@pytest.mark.parametrize("text", ["none", "200mbit", "1.5gbit", "8kbit", "32gbit", "123456bit", "2.5mbit"])
def test_a_printed_link_is_read_back(text: str):
    link = Link.parse(text)

    assert Link.parse(str(link)) == link
    if text not in ("123456bit",):
        assert str(link) == text


@pytest.mark.parametrize("text", ["200", "", "mbit", "1e9bit", "200 megabits", "200mbit/s", "-1mbit", "inf", "1bit"])
def test_what_is_not_a_rate_is_refused(text: str):
    with pytest.raises(ClusterError, match="link"):
        Link.parse(text)


@pytest.mark.parametrize(
    ("text", "latency_s"), [("0", 0.0), ("1ms", 1e-3), ("250us", 250e-6), ("0.5s", 0.5), ("0ms", 0.0)]
)
def test_latencies_are_seconds(text: str, latency_s: float):
    assert parse_latency(text) == pytest.approx(latency_s)
    assert parse_latency(format_latency(latency_s)) == pytest.approx(latency_s)
