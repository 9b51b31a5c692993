"""What may follow a codec's name, after colons: a block, then words, each at most once and in the codec's order."""

from __future__ import annotations

import re

from zcomm.errors import CodecError

NEAREST, STOCHASTIC, SHIFT = "nearest", "stochastic", "shift"  # roundings; the first is not spelled


def take_block(
    options: list[str],  # what is left of them; a block that is taken is removed
    default: int,
) -> int:
    """The block in elements, where the options begin with one, or the default."""
    if options and re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", options[0]):
        return int(options.pop(0))
    return default


def take_word(
    options: list[str],  # what is left of them; a word that is taken is removed
    words: tuple[str, ...],
    default: str,
) -> str:
    """The word, where the options begin with one of these, or the default."""
    return options.pop(0) if options and options[0] in words else default


def check_rounding(name: str, rounding: object, known: tuple[str, ...]) -> None:
    """Raise CodecError for a rounding that the codec does not have."""
    if rounding not in known:
        raise CodecError(f"{name} rounds to {' or '.join(known)}, got {rounding!r}; use one of these")
