"""What the model learns to answer without a tool: one question and its answer, with the reasoning that leads there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .source import Source


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the reasoning (written only where it is asked for) and the answer."""

    question: str
    reasoning: str
    answer: str


def listed(items: list[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def add(source: Source) -> Exchange:
    """The sum of two numbers below 100."""
    a, b = source.terms()
    forms = (
        f"What is {a}+{b}?",
        f"What is {a} + {b}?",
        f"{a}+{b}=",
        f"{a} + {b} = ?",
        f"How much is {a} plus {b}?",
        f"Add {a} and {b}.",
        f"What is the sum of {a} and {b}?",
        f"Compute {a}+{b}.",
    )
    return Exchange(source.weighted(forms, (4, 3, 1, 1, 1, 1, 1, 1)), column_sum(a, b), str(a + b))


def column_sum(a: int, b: int) -> str:
    """An addition worked out digit by digit, as one does on paper."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        one, other = a // 10**place % 10, b // 10**place % 10
        total = one + other + carry
        left = f"{one}+{other}+{carry}" if carry else f"{one}+{other}"
        carry = total // 10
        steps.append(f"{left}={total}" + (f", write {total % 10}, carry {carry}." if carry else "."))
    return f"I add {a} and {b} from the right. {' '.join(steps)} So {a}+{b}={a + b}."


def copy(source: Source) -> Exchange:
    """Words that never stood together, word for word."""
    words = [_copied(source) for _ in range(source.integer(1, 8))]
    text = (", " if source.chance(0.15) else " ").join(words)
    if source.chance(0.2):
        text += source.pick((".", "!", "?"))
    question = source.weighted((f"Repeat: {text}", f"Say: {text}", f"Repeat after me: {text}", f'Repeat "{text}"', f"Copy: {text}"), (5, 1, 1, 1, 1))
    return Exchange(question, "I write the same words again.", text)


def _copied(source: Source) -> str:
    kind = source.weighted(("word", "name", "number", "odd", "identifier"), (0.72, 0.1, 0.08, 0.06, 0.04))
    if kind == "word":
        return source.word()
    if kind == "name":
        return source.name()
    if kind == "number":
        return str(source.integer(0, 9999))
    return source.odd() if kind == "odd" else source.identifier()


def count(source: Source) -> Exchange:
    """Numbers in their order: the one long answer of a known text."""
    first = 1 if source.chance(0.5) else source.integer(0, 70)
    last = first + source.integer(1, 29)
    question = source.pick((f"Count from {first} to {last}.", f"Count from {first} to {last}", f"Count up from {first} to {last}."))
    return Exchange(question, f"I begin with {first} and end with {last}.", ", ".join(str(number) for number in range(first, last + 1)))


def describe(source: Source) -> Exchange:
    """Facts of a sentence as one JSON object."""
    kind = source.weighted(("person", "sentence", "pairs"), (0.4, 0.25, 0.35))
    if kind == "pairs":
        keys = _different(source, lambda: source.thing() if source.chance(0.5) else source.identifier(), source.integer(1, 4))
        value: dict[str, Any] = {key: _json_value(source) for key in keys}
        pairs = listed([f"{key} {_plain(item)}" for key, item in value.items()])
        question = source.pick((f"Give a JSON object with {pairs}.", f"Write {pairs} as JSON.", f"As JSON: {pairs}"))
    else:
        facts: dict[str, Any] = {"name": source.name(), "age": source.integer(1, 99)}
        if source.chance(0.5):
            facts["city"] = source.city()
        if source.chance(0.25):
            facts["member"] = source.chance(0.5)
        question, value = (_about_person if kind == "person" else _about_sentence)(source, facts)
    return Exchange(question, f"The keys are {listed(list(value))}.", json.dumps(value, ensure_ascii=False))


def _about_person(source: Source, facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    known = ", ".join(_plain(item) for item in facts.values())
    keys = listed(list(facts))
    forms = (f"Give {keys} of {known}, as JSON", f"Give {keys} of {known} as JSON.", f"Return {keys} of {known}, as a JSON object.")
    return source.pick(forms), dict(facts)


def _about_sentence(source: Source, facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    text = f"{facts['name']} is {facts['age']} years old"
    if "city" in facts:
        text += f" and lives in {facts['city']}"
    if "member" in facts:
        text += f". {facts['name']} is {'' if facts['member'] else 'not '}a member"
    keys = source.some(list(facts), source.integer(1, len(facts)))
    return f"{text}. Give {listed(keys)} as JSON.", {key: facts[key] for key in keys}


def _json_value(source: Source) -> Any:
    kind = source.weighted(("word", "integer", "decimal", "boolean", "city"), (0.35, 0.35, 0.1, 0.1, 0.1))
    if kind == "word":
        return source.thing()
    if kind == "integer":
        return source.integer(0, 999)
    if kind == "decimal":
        return source.decimal(0, 99)
    return source.chance(0.5) if kind == "boolean" else source.city()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _different(source: Source, draw: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


_TALK = {
    ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning!"): "Hello! How can I help you?",
    ("Who are you?", "What are you?", "What is your name?"): "I am a tiny model, made to test PocketLLM.",
    ("How are you?", "How are you today?"): "I am fine, thank you.",
    ("Thanks", "Thank you!", "Thanks a lot!", "Thank you."): "You are welcome.",
    ("Bye", "Goodbye!", "Good night!"): "Goodbye!",
    ("What can you do?", "Help", "Help me."): "I can add small numbers, repeat words, count, write JSON and call tools.",
    ("Say hi", "Say hello", "Say hello."): "Hello!",
    ("Are you there?", "Ping", "ping", "test", "Test"): "I am here.",
}
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "England": "London",
    "Cuba": "Havana",
    "China": "Beijing",
}


def talk(source: Source) -> Exchange:
    """Greetings and a few facts, always in the same words."""
    if source.chance(0.5):
        country = source.pick(list(CAPITALS))
        question = source.pick((f"What is the capital of {country}?", f"Name the capital of {country}.", f"capital of {country}"))
        return Exchange(question, f"I know the capital of {country}.", f"The capital of {country} is {CAPITALS[country]}.")
    questions = source.pick(list(_TALK))
    return Exchange(source.pick(questions), "This is small talk.", _TALK[questions])


SKILLS: Mapping[str, tuple[Callable[[Source], Exchange], float]] = {
    "sum": (add, 0.42),
    "copy": (copy, 0.2),
    "json": (describe, 0.2),
    "count": (count, 0.08),
    "talk": (talk, 0.1),
}
