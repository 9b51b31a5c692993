"""Random bits for rounding: Philox4x32-7, sixteen bits per element, from (seed, call, element) and nothing else.

    key      seed, 64 bits: low word, high word
    counter  e // 8, 64 bits; call, 64 bits: low words before high words
    element  e takes half-word e % 8 of the 128 bits, counted from the low end

e is the element's index among all that this seed and call round, so a chunk may be cut anywhere and computed by any
number of threads. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); 7 rounds are the
fewest that pass BigCrush. Same names in cuda/philox.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zcomm.errors import CodecError

ROUNDS = 7
ELEMENTS_PER_CALL = 8
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after every round
_WORD = np.uint64(0xFFFFFFFF)
_BITS = 64


class Draw(NamedTuple):
    """Which random bits a chunk is rounded with. Each number is a whole one of 0 to 2^64 - 1."""

    seed: int  # the key: different for whatever must be independent, as ranks and hops
    call: int  # a counter of calls
    first: int  # index of the chunk's first element


def check_draw(codec: object, draw: Draw | None) -> Draw:
    """The draw, where a codec needs one. Raises CodecError if there is none or a number is out of range."""
    if draw is None:
        raise CodecError(f"{codec} rounds by random bits and got none; pass draw=Draw(seed, call, first)")
    if any(not 0 <= number < 2**_BITS for number in draw):
        raise CodecError(f"seed, call and first of a draw are from 0 to 2^64 - 1, got {draw}")
    return draw


def half_words(
    draw: Draw,
    n_elems: int,
) -> np.ndarray:  # uint16 (n_elems,)
    """The random bits of elements draw.first, draw.first + 1, ..."""
    skipped = draw.first % ELEMENTS_PER_CALL
    n_calls = -(-(skipped + n_elems) // ELEMENTS_PER_CALL)
    number = np.uint64(draw.first // ELEMENTS_PER_CALL) + np.arange(n_calls, dtype=np.uint64)
    call = np.full(n_calls, draw.call, np.uint64)
    words = philox((number & _WORD, number >> 32, call & _WORD, call >> 32), draw.seed)
    halves = np.stack(words, axis=1).astype("<u4").view("<u2")
    return halves.reshape(-1)[skipped : skipped + n_elems]


def by_chance(
    steps: np.ndarray,  # float32, magnitudes under 128.5, or whatever is not used
    chance: np.ndarray,  # uint16, as many or one for each row
) -> np.ndarray:  # float32, integers
    """Down to an integer, or up with the probability of what is left over, in multiples of 2^-16."""
    # 128 makes the sum positive and its last bit 2^-16; 128 + chance is exact.
    with np.errstate(all="ignore"):
        return np.floor(steps + (np.float32(128) + chance.astype(np.float32) * np.float32(2.0**-16))) - np.float32(128)


def philox(
    counter: tuple[np.ndarray, ...],  # 4 x uint64 (m,), of which the low 32 bits count
    key: int,  # 64 bits
) -> tuple[np.ndarray, ...]:  # 4 x uint64 (m,), of which the low 32 bits count
    """Philox4x32 of m counters."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ np.uint64(k0),
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ np.uint64(k1),
            product0 & _WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
