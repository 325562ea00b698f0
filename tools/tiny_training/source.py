"""Where the generated conversations draw their words and numbers from, in two halves that share nothing: one to train on, one to score on."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def words(text: str) -> list[str]:
    """The words of a list that is written as a text."""
    return text.split()


CITIES = words(
    "Oslo Rome Paris London Berlin Madrid Lisbon Vienna Prague Warsaw Dublin Athens Cairo Tokyo Kyoto Osaka Seoul Delhi Mumbai Lima Quito Bogota "
    "Havana Boston Chicago Denver Dallas Seattle Toronto Montreal Sydney Perth Geneva Zurich Milan Turin Naples Porto Seville Lyon Nice Munich Hamburg "
    "Cologne Bergen Helsinki Riga Tallinn Vilnius Kiev Sofia Ankara Beirut Nairobi Lagos Accra Dakar Tunis Rabat Hanoi Manila Jakarta Bangkok Beijing "
    "Shanghai"
)
NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Ugo Vera Will Yara Zoe Alice Bob Carol Dan Eve "
    "Frank Gina Henry Iris John Karen Lucas Maria Nina Oscar Peter Quinn Ruth Simon Tom Uma Victor Wendy Alan Bella Chris"
)
COMMON = words(
    "apple river stone green house blue table light water paper cloud bird tree red moon star fish glass bread milk egg salt sugar tea coffee book pen "
    "chair lamp door window garden road train ship plane horse dog cat mouse lion bear wolf fox shoe hat coat ring gold silver iron wood sand snow "
    "rain wind fire north south east west spring summer autumn winter small large old new fast slow warm cold soft hard dark bright sweet quiet happy "
    "early late open round square yellow black white orange purple music film game story letter number market school bridge tower island forest lake "
    "hill valley cheese rice soup cake lemon onion potato tomato"
)
ODD = words("café naïve über señor Łódź Ærø 東京 水 дом мир ñandú 🦀 🙂 🚀 ✓ → € ½ x² φ λ")
SMALL_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_ONSETS = words("b c d f g h j k l m n p r s t v w z bl br ch cl dr fl gr pl pr sh sk sl sp st th tr")
_VOWELS = words("a e i o u ai ea ee oo ou")
_CODAS = ["", "", "", *words("b d g k l m n p r s t x ck ld lt mp nd ng nt rd rk rt sk st")]


def is_held_out(text: str) -> bool:
    """Whether a word, a name or a sum is kept for scores, and never trained on: one in eight is."""
    return zlib.crc32(text.encode()) % 8 == 0


class Source:
    """Seeded draws.

    Args:
        seed: any text or number; equal seeds give equal draws.
        held_out: draw what training never sees.
    """

    def __init__(self, seed: object, *, held_out: bool = False) -> None:
        self._random = random.Random(f"{seed}")
        self.held_out = held_out

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        return self._random.choice(items)

    def weighted(self, items: Sequence[T], weights: Sequence[float]) -> T:
        return self._random.choices(items, weights)[0]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in an order of their own."""
        return self._random.sample(items, count)

    def mine(self, draw: Callable[[], str]) -> str:
        """The first result of `draw` that is in this source's half."""
        while is_held_out(found := draw()) != self.held_out:
            pass
        return found

    def city(self) -> str:
        return self.mine(lambda: self.pick(CITIES) if self.chance(0.5) else self._syllables().capitalize())

    def name(self) -> str:
        return self.mine(lambda: self.pick(NAMES) if self.chance(0.5) else self._syllables().capitalize())

    def word(self) -> str:
        """A word of one to three syllables that means nothing, or now and then a common one."""
        return self.mine(lambda: self.pick(COMMON) if self.chance(0.3) else self._syllables())

    def thing(self) -> str:
        """A common word, most often."""
        return self.mine(lambda: self.pick(COMMON) if self.chance(0.75) else self._syllables())

    def odd(self) -> str:
        """A text of characters that take several bytes."""
        return self.pick(ODD)

    def identifier(self) -> str:
        """A name such as a program's: `zorbel`, `blat_mip`, `getTrosk`."""
        return self.mine(self._identifier)

    def terms(self) -> tuple[int, int]:
        """Two numbers of at most two digits to add."""
        while True:
            a, b = (self.integer(0, 99 if self.chance(0.75) else 9) for _ in range(2))
            if is_held_out(f"{a}+{b}") == self.held_out:
                return a, b

    def decimal(self, low: int, high: int) -> float:
        """A number with one or two digits after the point, which it is written with."""
        return self.integer(low * 100, high * 100) / 100 if self.chance(0.3) else self.integer(low * 10, high * 10) / 10

    def number(self, low: int, high: int) -> int | float:
        """A whole number, or one with a point in it."""
        return self.integer(low, high) if self.chance(0.5) else self.decimal(low, high)

    def _syllables(self) -> str:
        count = self.weighted((1, 2, 3), (0.3, 0.5, 0.2))
        return "".join(self.pick(_ONSETS) + self.pick(_VOWELS) + (self.pick(_CODAS) if last == count - 1 else "") for last in range(count))

    def _identifier(self) -> str:
        first, second = self._syllables(), self._syllables()
        return self.weighted((first, f"{first}_{second}", first + second.capitalize()), (0.5, 0.4, 0.1))
