"""Random bits: Philox4x32-7 as its authors publish it, sixteen bits to an element wherever a chunk begins."""

import numpy as np
import pytest

from zcomm.wire.draw import Draw, half_words, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),  # Random123, kat_vectors, philox4x32 of 7 rounds; the key's low word comes first there
    [
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    found = philox(tuple(np.array([word], np.uint64) for word in counter), key)

    assert tuple(int(word[0]) for word in found) == words


def test_an_element_takes_its_half_word_from_the_low_end() -> None:
    words = philox(tuple(np.array([word], np.uint64) for word in (5, 1, 7, 0)), 9)
    together = sum(int(word[0]) << 32 * i for i, word in enumerate(words))

    found = half_words(Draw(seed=9, call=7, first=8 * (2**32 + 5)), 8)

    assert found.tolist() == [together >> 16 * i & 0xFFFF for i in range(8)]


@pytest.mark.parametrize("first", [0, 1, 7, 8, 2**35 - 3, 2**40 + 5])
def test_an_element_s_bits_do_not_depend_on_where_the_chunk_begins(first: int) -> None:
    whole = half_words(Draw(1, 2, first), 100)

    assert (half_words(Draw(1, 2, first + 37), 63) == whole[37:]).all()
    assert half_words(Draw(1, 2, first), 0).size == 0


def test_another_seed_or_call_gives_other_bits() -> None:
    draws = [Draw(0, 0, 0), Draw(1, 0, 0), Draw(2**32, 0, 0), Draw(0, 1, 0), Draw(0, 2**32, 0), Draw(0, 0, 2**38)]
    bits = [half_words(draw, 4096).astype(float) for draw in draws]

    assert np.abs(np.corrcoef(bits) - np.eye(len(bits))).max() < 0.08  # five deviations of independent ones
    assert all(abs(of_draw.mean() / 65535 - 0.5) < 0.025 for of_draw in bits)
