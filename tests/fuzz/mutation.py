"""Mutation: an input made from valid inputs with a few changes; the same number always gives the same input."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXTREMES = [
    "0 1 -1 2 255 65536 2147483647 2147483648 4294967296 9223372036854775807 9223372036854775808 18446744073709551615",
    "18446744073709551616 -9223372036854775809 1e3 1e999 -1e999 1.5 -0 -0.0 00 0x10 1_0 +1 NaN Infinity -Infinity",
]
NUMBERS = [*" ".join(EXTREMES).split(), "9" * 30, "9" * 5000, "1" + "0" * 400]
VALUES = [
    *("null", "true", "false", '""', "[]", "{}", "[[]]", "[{}]", '{"":{}}', r'"\u0000"', r'"a\u0000b"'),
    *('"' + "a" * 300 + '"', '"' + "a/" * 3000 + '"', "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60),
    *("1", "3", "7", "12", "18446744073709551615", "9223372036854775808"),
]
BROKEN = [  # what is no JSON, or for some readers
    *NUMBERS,
    *("nul", "'a'", '"', r'"\ud800"', r'"\udfff\ud800"', r'"\x"', '"\x00"', '"\n"', '"\\'),
    *("[" * 2000 + "]" * 2000, "[" * 20000, '{"a":' * 3000, '{"a":' * 500 + "1" + "}" * 500),
]
BYTES = (b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xc0\x80", *(bytes([byte]) for byte in b'{}[]",:\\'))
LENGTHS = [0, 1, 2, 7, 8, 9, 2**16, 10**8 - 1, 10**8, 10**8 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


@dataclass(frozen=True)
class Seed:
    """A valid input: `text` is JSON; where it is framed, a header, with its length before and `body` behind it. Of
    another `codec` it stands for bytes that are no text."""

    text: str
    body: bytes = b""
    framed: bool = False
    codec: str = "utf-8"

    @property
    def content(self) -> bytes:
        return self.text.encode(self.codec)


class Mutator:
    """Makes inputs of `seeds`; `tokens` are values (as JSON) that mean something to the parser."""

    def __init__(self, seeds: Sequence[Seed], tokens: Sequence[str]) -> None:
        self.seeds, self.values = seeds, [*VALUES, *list(tokens) * (1 + len(VALUES) // len(tokens))]
        self.random = random.Random()

    def make(self, number: int) -> bytes:
        self.random.seed(number)
        seed = self.random.choice(self.seeds)
        text = seed.content
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 5))):
            text = self.random.choice(self._changes)(self, text)
        if not seed.framed:
            return text
        body = self._bytes(seed.body) if self.random.random() < 0.1 else seed.body
        return self._framed(text, body)

    def _framed(self, text: bytes, body: bytes) -> bytes:
        chance = self.random.random()
        length = len(text)
        if chance < 0.03:
            length = self.random.choice(LENGTHS)
        elif chance < 0.06:
            length = max(0, length + self.random.randint(-9, 9))
        whole = length.to_bytes(8, "little") + text + body
        return self._bytes(whole) if self.random.random() < 0.05 else whole

    def _tree(self, text: bytes) -> bytes:
        """Change a place in the tree, if it still is one."""
        try:
            tree = json.loads(text, object_pairs_hook=Pairs)
        except (ValueError, RecursionError):
            return self._bytes(text)
        places = _places(tree)
        if not places:
            return self._value().encode()
        place, other = self.random.choice(places), self.random.choice(places)
        inner = [place for place in places if isinstance(place.get(), str) and place.get().startswith("{")]
        if inner and self.random.random() < 0.4:  # a document in a document
            text = self._tree(inner[0].get().encode(errors="surrogatepass"))
            inner[0].set(text.decode(errors="replace"))
        else:
            self.random.choice(self._edits)(self, place, other)
        try:
            return dump(tree).encode(errors="surrogatepass")
        except RecursionError:  # a place was put into itself
            return text

    def _replace(self, place: "Place", other: "Place") -> None:
        place.set(Raw(self._value()))

    def _copy(self, place: "Place", other: "Place") -> None:
        place.set(other.get())

    def _delete(self, place: "Place", other: "Place") -> None:
        del place.holder[place.at]

    def _double(self, place: "Place", other: "Place") -> None:
        place.holder.insert(self.random.randint(0, len(place.holder)), place.holder[place.at])

    def _move(self, place: "Place", other: "Place") -> None:
        key = place.holder[place.at][0] if isinstance(place.holder, Pairs) else "a"
        other.holder.append([key, place.get()] if isinstance(other.holder, Pairs) else place.get())

    def _wrap(self, place: "Place", other: "Place") -> None:
        place.set(self.random.choice(([place.get()], Pairs([["a", place.get()]]))))

    def _rename(self, place: "Place", other: "Place") -> None:
        if isinstance(place.holder, Pairs):
            keys = [pair[0] for pair in place.holder if isinstance(pair, list)]
            key = self._value() if self.random.random() < 0.7 else json.dumps(self.random.choice(keys or [""]))
            place.holder[place.at] = [Raw(key if key.startswith('"') else json.dumps(key)), place.get()]

    def _nudge(self, place: "Place", other: "Place") -> None:
        value = place.get()
        if isinstance(value, int):
            place.set(self.random.choice((value + 1, value - 1, value * 2, value // 2, -value, value * 2**32)))
        elif isinstance(other.get(), type(value)):
            mine, theirs = place.get(), other.get()
            place.set(theirs)
            other.set(mine)

    _edits: Sequence[Callable[..., None]] = (_replace, _replace, _copy, _delete, _double, _move, _wrap, _rename, _nudge)

    def _number(self, text: bytes) -> bytes:
        """Replace one number by another, in strings too."""
        found = list(re.finditer(rb"\d+", text))
        if not found:
            return self._bytes(text)
        number = self.random.choice(found)
        near = str(max(0, int(number[0][:9]) + self.random.choice((-1, 1))))
        other = near if self.random.random() < 0.5 else self.random.choice(NUMBERS)
        return text[: number.start()] + other.encode() + text[number.end() :]

    def _bytes(self, text: bytes) -> bytes:
        """Flip, insert, remove, repeat, cut off, or join with another seed."""
        content = bytearray(text)
        at, end = sorted(self.random.randint(0, len(content)) for _ in range(2))
        kind = self.random.randrange(7)
        if kind == 0 and content:
            content[min(at, len(content) - 1)] ^= 1 << self.random.randrange(8)
        elif kind == 1:
            content[at:at] = self.random.choice(BYTES)
        elif kind == 2:
            del content[at : min(end, at + 8)]
        elif kind == 3:
            content[at:at] = content[at:end]
        elif kind == 4:
            del content[at:]
        elif kind == 5:
            content[at:] = self.random.choice(self.seeds).content[at:]
        else:
            content[at : at + 4] = self._value().encode(errors="surrogatepass")
        return bytes(content)

    def _value(self) -> str:
        return self.random.choice(BROKEN if self.random.random() < 0.1 else self.values)

    _changes: Sequence[Callable[..., bytes]] = (_tree,) * 8 + (_number, _bytes)


class Pairs(list[Any]):
    """An object of JSON: its keys with their values, in order, each as often as it is there."""


class Raw(str):
    """What is written as it is."""


@dataclass
class Place:
    """Where a value is: in a list, or in the pairs of an object."""

    holder: list[Any]
    at: int

    def get(self) -> Any:
        return self.holder[self.at][1] if isinstance(self.holder, Pairs) else self.holder[self.at]

    def set(self, value: Any) -> None:
        self.holder[self.at] = [self.holder[self.at][0], value] if isinstance(self.holder, Pairs) else value


def _places(tree: Any) -> list[Place]:
    found, rest = [], [tree]
    while rest:
        holder = rest.pop()
        if isinstance(holder, list):
            if isinstance(holder, Pairs):
                holder[:] = [list(pair) for pair in holder]
            own = [Place(holder, at) for at in range(len(holder))]
            found += own
            rest += [place.get() for place in own]
    return found


def dump(node: Any) -> str:
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{dump(key)}:{dump(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node)
