"""Generated conversations: turns of every skill, with and without tools, the last one with or without reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .skills import SKILLS, listed
from .source import Source
from .tool import Case, Tool
from .tool_families import FAMILIES

SKILL_NAMES = (*SKILLS, "call", "result", "think")
_MAX_CHARACTERS = 1100  # of questions and answers; a row of about 512 tokens with its tools
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in few words.",
    "Be brief.",
    "You are a careful assistant.",
    "Answer the user's questions.",
    "Use the tools when they help.",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client would send, and the assistant's turns with it.

    Args:
        messages: in OpenAI's form, with reasoning_content where the assistant reasons and mappings as the arguments of calls.
        tools: declarations, or none.
        skills: of each assistant message, one of SKILL_NAMES.
        thinking: whether the turns after the last question reason.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    skills: tuple[str, ...]
    thinking: bool

    def up_to_answer(self, index: int) -> tuple[Conversation, Mapping[str, Any]]:
        """The conversation before the assistant message that is number `index`, counted as in `skills`, and that message."""
        index = index % len(self.skills)
        places = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return replace(self, messages=self.messages[: places[index]], skills=self.skills[:index]), self.messages[places[index]]


def draw_conversation(source: Source) -> Conversation:
    """One conversation of the training mixture."""
    tools = _draw_tools(source) if source.chance(0.55) else ()
    turns = 1 if source.chance(0.3) else source.integer(2, 5 if tools else 12)
    return _converse(source, tools, ["call" if tools and source.chance(0.85) else _draw_skill(source, tools) for _ in range(turns)], source.chance(0.25))


def draw_problem(source: Source, skill: str) -> Conversation:
    """A conversation whose last answer shows `skill`; half of them begin with it."""
    tools = _draw_tools(source) if skill in ("call", "result") or source.chance(0.2) else ()
    thinking = skill == "think"
    last = "call" if skill in ("call", "result") else skill
    if skill == "think":
        last = "call" if tools else _draw_skill(source, tools)
    elif skill == "sum":
        tools = tuple(tool for tool in tools if tool.family != "arithmetic")
    earlier = [_draw_skill(source, tools) for _ in range(0 if source.chance(0.5) else source.integer(1, 3))]
    found = _converse(source, tools, [*earlier, last], thinking)
    if last == "call" and skill != "result":  # the calls alone, not what follows them
        before, answer = found.up_to_answer(-2)
        return replace(before, messages=(*before.messages, answer), skills=(*before.skills, found.skills[-2]))
    return found


def _draw_tools(source: Source) -> tuple[Tool, ...]:
    makers, weights = zip(*FAMILIES, strict=True)
    found: dict[str, Tool] = {}
    for _ in range(source.weighted((1, 2, 3), (0.4, 0.4, 0.2))):
        tool = source.weighted(makers, weights)(source)
        if tool.name not in {other.name for other in found.values()}:
            found.setdefault(tool.family, tool)
    return tuple(found.values())


def _draw_skill(source: Source, tools: Sequence[Tool]) -> str:
    """A skill that takes none of `tools`."""
    names = [name for name in SKILLS if name != "sum" or all(tool.family != "arithmetic" for tool in tools)]
    return source.weighted(names, [SKILLS[name][1] for name in names])


def _converse(source: Source, tools: Sequence[Tool], turns: Sequence[str], thinking: bool) -> Conversation:
    """A conversation with these turns, or, if they are long, with the last of them."""
    exchanges: list[tuple[list[Mapping[str, Any]], list[str]]] = []
    length = 0
    for turn in reversed(turns):
        thinks = thinking and not exchanges
        exchange = _call_turns(source, source.pick(tools), thinks) if turn == "call" else _plain_turns(source, turn, thinks)
        length += sum(len(str(message["content"])) + 60 * len(message.get("tool_calls", ())) for message in exchange[0])
        if exchanges and length > _MAX_CHARACTERS:
            break
        exchanges.append(exchange)
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": source.pick(_SYSTEM)}] if source.chance(0.25) else []
    skills: list[str] = []
    for spoken, shown in reversed(exchanges):
        messages += spoken
        skills += shown
    return Conversation(tuple(messages), tuple(tool.declaration for tool in tools), tuple(skills), thinking)


def _plain_turns(source: Source, skill: str, thinks: bool) -> tuple[list[Mapping[str, Any]], list[str]]:
    exchange = SKILLS[skill][0](source)
    answer = {"role": "assistant", "content": exchange.answer, **({"reasoning_content": exchange.reasoning} if thinks else {})}
    return [{"role": "user", "content": exchange.question}, answer], ["think" if thinks else skill]


def _call_turns(source: Source, tool: Tool, thinks: bool) -> tuple[list[Mapping[str, Any]], list[str]]:
    case: Case = tool.ask(source)
    keys = list(case.calls[0])
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": tool.name, "arguments": dict(arguments)}}
        for number, arguments in enumerate(case.calls)
    ]
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    answered = {"role": "assistant", "content": case.answer}
    if thinks:
        called["reasoning_content"] = f"I call {tool.name} with {listed(keys)}." if keys else f"I call {tool.name}."
        answered["reasoning_content"] = f"{tool.name} has answered."
    results = [{"role": "tool", "tool_call_id": f"call_{number}", "content": text} for number, text in enumerate(case.results)]
    return [{"role": "user", "content": case.question}, called, *results, answered], ["think", "think"] if thinks else ["call", "result"]
