"""Writes the tables of docs/ that the code itself knows: CLI flags from the option classes, request fields from the field table.

python scripts/doc_tables.py            rewrites the tables between their markers
python scripts/doc_tables.py --check    exits with 1 if a table is out of date
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pocketllm.backends.base import Capabilities
from pocketllm.backends.cpp import CppBackend
from pocketllm.backends.torch import TorchBackend
from pocketllm.bench.args import CompareBenchArgs, LatencyBenchArgs, ServeBenchArgs, ThroughputBenchArgs
from pocketllm.config import EngineArgs, ServerArgs, SupervisorArgs
from pocketllm.protocol.features import GRAMMAR_FEATURES, GUIDE_FLAGS, HOST_FEATURES, RANKING_FEATURES, VOCABULARY_FEATURES, features
from pocketllm.protocol.field import Endpoint, Field
from pocketllm.protocol.fields import FIELDS
from pocketllm.protocol.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
# What each plane declares, with the server's own features.
PLANES = {
    name: features(Capabilities(name, "", 0, 0, 0, **dict.fromkeys(plane.DECLARES, True)), "full", frozenset(VOCABULARY_FEATURES))  # type: ignore[arg-type]
    for name, plane in (("torch", TorchBackend), ("cpp", CppBackend))
}
sys.path.append(str(ROOT / "scripts"))  # it runs as a module too

import performance_tables  # noqa: E402


def option_table(cls: type[Any]) -> str:
    """Flag, default and meaning of each field of an options class."""
    rows = []
    for option in dataclasses.fields(cls):
        default = "" if option.default in (None, dataclasses.MISSING) else f"`{option.default}`"
        rows.append((f"`--{option.name.replace('_', '-')}`", default, option.metadata["help"]))
    return _table(("Flag", "Default", "Meaning"), rows)


def field_table(endpoint: Endpoint) -> str:
    """Name, state, values and behaviour of each request field of an endpoint."""
    rows = [
        (f"`{field.name}`", *(_state(field, endpoint, acted_on) for acted_on in PLANES.values()), field.accepts, field.behaviour)
        for field in FIELDS
        if endpoint in field.endpoints
    ]
    return _table(("Field", *(f"{name} plane" for name in PLANES), "Accepted", "What the server does"), rows)


def _state(field: Field, endpoint: Endpoint, acted_on: frozenset[str]) -> str:
    """What becomes of a field on a plane that declares `acted_on`, the server's own features included."""
    if field.group == "inert":
        return "ignored"
    needed = [rule.feature for rule in RULES if rule.field.partition(".")[0] == field.name and endpoint in rule.endpoints and rule.feature is not None]
    lacking = dict.fromkeys(feature for feature in needed if feature not in acted_on)
    if field.group == "refused" or (lacking and set(needed) == set(lacking)):
        return "refused"
    return "acted on" + "".join(f", not `{feature}`" for feature in lacking)


def refusal_table(endpoint: Endpoint) -> str:
    """Each refusal of an endpoint, in the order in which they are applied."""
    rows = []
    for rule in RULES:
        if endpoint in rule.endpoints:
            lifted = f"`{rule.feature}`" if rule.feature else ""
            guide = "" if rule.feature is None else "the same" if rule.feature in GUIDE_FLAGS else "refused"
            rows.append((f"`{rule.field}`", rule.when, _sentence(rule.instead), _sentence(rule.remedy), lifted, guide))
    return _table(("Field", "Refused when", "Why, or what the server does instead", "Remedy", "Unless there is", "With `--surface guide`"), rows)


def feature_table() -> str:
    """Where each feature comes from."""
    rows = [(f"`{name}`", "always", _sentence(words)) for name, words in HOST_FEATURES.items()]
    rows += [(f"`{name}`", "where the engine declares `structured_outputs`", _sentence(words)) for name, words in GRAMMAR_FEATURES.items()]
    rows += [(f"`{name}`", "where the engine declares `logprobs`", _sentence(words)) for name, words in RANKING_FEATURES.items()]
    rows += [(f"`{name}`", "where the vocabulary has tokens for it", _sentence(words)) for name, words in VOCABULARY_FEATURES.items()]
    flags = {option.name for option in dataclasses.fields(Capabilities)}
    for name in dict.fromkeys(rule.feature for rule in RULES if rule.feature is not None):
        if name not in {**HOST_FEATURES, **GRAMMAR_FEATURES, **RANKING_FEATURES, **VOCABULARY_FEATURES}:
            fields = ", ".join(dict.fromkeys(f"`{rule.field}`" for rule in RULES if rule.feature == name))
            planes = [plane for plane, acted_on in PLANES.items() if name in acted_on]
            there = "on no engine yet" if name not in flags or not planes else f"where the engine declares it: the {' and the '.join(planes)} plane"
            rows.append((f"`{name}`", there + ("s" if len(planes) > 1 and name in flags else ""), f"{fields} as the table below says."))
    return _table(("Feature", "There", "What it is"), rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "engine-flags": ("docs/cli.md", lambda: option_table(EngineArgs)),
    "server-flags": ("docs/cli.md", lambda: option_table(ServerArgs)),
    "supervisor-flags": ("docs/cli.md", lambda: option_table(SupervisorArgs)),
    "bench-latency-flags": ("docs/benchmarks.md", lambda: option_table(LatencyBenchArgs)),
    "bench-throughput-flags": ("docs/benchmarks.md", lambda: option_table(ThroughputBenchArgs)),
    "bench-serve-flags": ("docs/benchmarks.md", lambda: option_table(ServeBenchArgs)),
    "bench-compare-flags": ("docs/benchmarks.md", lambda: option_table(CompareBenchArgs)),
    "features": ("docs/request-fields.md", feature_table),
    "chat-fields": ("docs/request-fields.md", lambda: field_table("chat")),
    "chat-refusals": ("docs/request-fields.md", lambda: refusal_table("chat")),
    "completions-fields": ("docs/request-fields.md", lambda: field_table("completions")),
    "completions-refusals": ("docs/request-fields.md", lambda: refusal_table("completions")),
    **performance_tables.TABLES,
}


def outdated(*, write: bool) -> list[str]:
    """Names of the tables that differ from the code; with `write` they are put right.

    Raises:
        ValueError: a document lacks the markers of its table.
    """
    found = []
    for name, (document, make) in TABLES.items():
        path = ROOT / document
        text = path.read_text()
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise ValueError(f"{document} has no place for the table {name}: put <!-- {name} --> and <!-- end of {name} --> where it belongs")
        fresh = text[: match.end(1)] + make() + text[match.start(2) :]
        if fresh != text:
            found.append(name)
            if write:
                path.write_text(fresh)
    return found


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print("usage: python scripts/doc_tables.py [--check]", file=sys.stderr)
        return 2
    names = outdated(write=not check)
    if check and names:
        print(f"doc_tables: out of date: {', '.join(names)}. Run python scripts/doc_tables.py.", file=sys.stderr)
        return 1
    return 0


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
