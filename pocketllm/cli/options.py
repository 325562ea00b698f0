"""Flags made of the fields of an options dataclass, so that the command line and Python have one word for each knob."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn

from pocketllm.config import parse_option


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line and exit code 2, and without guessed abbreviations."""

    def __init__(self, prog: str, **options: Any) -> None:
        options = {"usage": f"{prog} [options]", **options, "allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(2, f"pocketllm: error: {message}{end} See {self.prog} --help.\n")

    def flags(self) -> list[str]:
        """Every long flag of this parser."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]


def flag_of(name: str) -> str:
    """`--max-model-len` of `max_model_len`."""
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, cls: type[Any], title: str, leave_out: Collection[str] = ()) -> None:
    """A group of flags, one for each field of `cls`. What is not given does not appear among the parsed arguments."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for option in dataclasses.fields(cls):
        if option.name in leave_out:
            continue
        hint = hints[option.name]
        text = str(option.metadata["help"]).replace("%", "%%")
        if "[" not in text and option.default is not dataclasses.MISSING and option.default is not None:
            text += f" [{str(option.default).lower() if hint is bool else option.default}]"
        if hint is bool:
            group.add_argument(flag_of(option.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        metavar = option.metadata["metavar"] or ("{" + ",".join(typing.get_args(hint)) + "}" if typing.get_origin(hint) is Literal else option.name.upper())
        group.add_argument(flag_of(option.name), metavar=metavar, default=argparse.SUPPRESS, help=text)


def given_options(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The fields of `cls` that the command line gave, parsed.

    Raises:
        ConfigurationError: a text spells no value of its field's type.
    """
    given = vars(arguments)
    names = [option.name for option in dataclasses.fields(cls) if option.name in given]
    return {name: given[name] if isinstance(given[name], bool) else parse_option(cls, name, given[name]) for name in names}


def spell_options(options: Any, leave_out: Collection[str] = ()) -> list[str]:
    """The flags that give another process the same options, whatever variables are set there; those that are None are left out."""
    flags: list[str] = []
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if option.name in leave_out or value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag_of(option.name) if value else flag_of("no_" + option.name))
        else:
            flags.append(f"{flag_of(option.name)}={json.dumps(dict(value)) if isinstance(value, Mapping) else value}")
    return flags


def refuse_unknown(parser: Parser, unknown: list[str]) -> None:
    """End with the name of the first unknown argument, and with the flag that it may stand for."""
    if not unknown:
        return
    flag = unknown[0].partition("=")[0]
    close = difflib.get_close_matches(flag, parser.flags(), 1)
    parser.error(f"{flag} is not known" + (f"; did you mean {close[0]}?" if close else ""))
