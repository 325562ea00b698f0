"""`pocketllm chat`: a conversation in the terminal, or one prompt from the command line or a pipe."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.cli.exit import exit_while_loading
from pocketllm.cli.options import given_options
from pocketllm.cli.progress import ProgressLine
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.outputs import Usage
from pocketllm.protocol.conditions import REASONING_EFFORTS
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.rules import THINKING_MODES
from pocketllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pocketllm.llm import LLM

EXAMPLES = """\
examples:
  pocketllm chat                                       a conversation with the embedded model
  pocketllm chat -p "Why is the sky blue?"             one answer
  echo "Name three rivers." | pocketllm chat           one answer for each line of a pipe
  pocketllm chat --model ./model.gguf --temperature 0 --system "Answer in French."

/help inside the conversation lists its commands. Ctrl-C stops an answer, Ctrl-D leaves.
"""

SAMPLING = {
    "temperature": "0 always takes the likeliest token, higher varies more",
    "top_p": "draw from the likeliest tokens that together have this probability; 1 is off",
    "top_k": "draw from so many of the likeliest tokens; 0 is off",
    "max_tokens": "most tokens of an answer",
    "seed": "whole number; the same one gives the same answer again",
}
TEMPLATE = {
    "reasoning_effort": f"{', '.join(REASONING_EFFORTS)}; for models that reason",
    "thinking_mode": f"{' or '.join(THINKING_MODES)}; for models that reason",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that are the conversation's own."""
    group = parser.add_argument_group("conversation")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and leave")
    group.add_argument("--system", metavar="TEXT", help="system message")
    for name, text in {**SAMPLING, **TEMPLATE}.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", metavar=name.upper(), help=text)


def run(arguments: argparse.Namespace) -> int:
    """Hold the conversation; the exit code.

    Raises:
        PocketLLMError: an option is wrong, the model can't be loaded, or the one prompt fails.
    """
    conversation = Conversation(arguments.system)
    for name in (*SAMPLING, *TEMPLATE):
        if (text := getattr(arguments, f"set_{name}")) is not None:
            conversation.set(name, text)
    from pocketllm.llm import LLM  # late: --help and a wrong option need neither tokenizer nor template

    args = EngineArgs.from_env(**given_options(arguments, EngineArgs))
    try:
        with ProgressLine() as line:
            llm = LLM(args, progress=line)
    except KeyboardInterrupt:
        exit_while_loading(130)
    with llm:
        if arguments.prompt is not None:
            conversation.answer(llm, arguments.prompt)
            return 0
        return _Terminal(llm, conversation).run()


class Conversation:
    """The turns so far and the settings of the next one.

    Args:
        system: system message, or None.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model is given: the system message and the turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def set(self, name: str, text: str) -> None:
        """Set `name` to the value that `text` spells; "default" takes it back.

        Raises:
            ConfigurationError: there is no such setting, or the value is out of its range.
        """
        if name not in (*SAMPLING, *TEMPLATE):
            raise ConfigurationError(f"{name} is no setting: there are {', '.join((*SAMPLING, *TEMPLATE))}.", param=name)
        changed = {key: value for key, value in self.settings.items() if key != name}
        if text != "default":
            changed[name] = _value(text) if name in SAMPLING else text
        SamplingParams(**{key: value for key, value in changed.items() if key in SAMPLING})
        check_fields({key: value for key, value in changed.items() if key in TEMPLATE}, "chat")
        self.settings = changed

    def answer(self, llm: LLM, text: str) -> Usage | None:
        """Print the answer to `text` as it comes, and on stderr what the model thinks before.

        What was printed before Ctrl-C stays in the history; a failed turn does not.

        Returns:
            The token counts, or None when Ctrl-C ended the answer.

        Raises:
            PocketLLMError: the request was refused or failed.
        """
        sampling = SamplingParams(**{key: value for key, value in self.settings.items() if key in SAMPLING})
        options = {key: value for key, value in self.settings.items() if key in TEMPLATE}
        parts: list[str] = []
        thoughts: list[str] = []
        usage: Usage | None = None
        with llm.chat_stream([*self.messages, {"role": "user", "content": text}], sampling, **options) as stream:
            try:
                for event in stream:
                    if event.reasoning_content:
                        thoughts.append(event.reasoning_content)
                        print(event.reasoning_content, end="", file=sys.stderr, flush=True)
                    if event.text and thoughts and not parts:
                        print("\n", file=sys.stderr, flush=True)
                    if event.text:
                        parts.append(event.text)
                        print(event.text, end="", flush=True)
                    usage = event.usage
            except KeyboardInterrupt:
                usage = None
            except PocketLLMError:
                if parts or thoughts:  # so that the error has a line of its own
                    print(file=sys.stdout if parts else sys.stderr, flush=True)
                raise
        print(flush=True)
        turn = {"role": "assistant", "content": "".join(parts)}
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        self.turns += [{"role": "user", "content": text}, turn]
        return usage


class _Terminal:
    """Reads lines, answers them, and obeys those that begin with a slash."""

    def __init__(self, llm: LLM, conversation: Conversation) -> None:
        self._llm = llm
        self._conversation = conversation
        self._is_terminal = sys.stdin.isatty()
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "help": ("this list", self._help),
            "reset": ("forget the conversation, keep the system message and the settings", self._reset),
            "system": ("TEXT: set the system message; nothing after it shows it", self._system),
            "set": (f"NAME VALUE: one of {', '.join((*SAMPLING, *TEMPLATE))}; VALUE default takes it back", self._set),
            "history": ("the conversation so far", self._history),
            "save": ("FILE: write the conversation as JSON, in the form that /v1/chat/completions takes", self._save),
            "retry": ("answer the last message again", self._retry),
            "quit": ("leave, as Ctrl-D does", self._quit),
        }

    def run(self) -> int:
        if self._is_terminal:
            _enable_line_editing()
            self._note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.")
        failures = 0
        while True:
            try:
                line = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /quit leaves.")
                continue
            try:
                self._handle(line.strip())
            except EOFError:  # /quit
                break
            except PocketLLMError as error:
                failures += 1
                self._note(f"pocketllm: error: {' '.join(error.message.split())}")
            except KeyboardInterrupt:  # before the first token
                self._note("")
        # A person has seen the failures; a script has only the exit code.
        return 2 if failures and not self._is_terminal else 0

    def _read(self) -> str:
        try:
            line = input("> ") + "\n" if self._is_terminal else sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"The input is not {error.encoding} text ({error.reason}): convert it first.") from None
        if not line:
            raise EOFError
        return line

    def _handle(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line[1:].partition(" ")
        if name not in self._commands:
            raise ConfigurationError(f"/{name} is no command: /help lists them.")
        self._commands[name][1](rest.strip())

    def _answer(self, text: str) -> None:
        start = time.perf_counter()
        usage = self._conversation.answer(self._llm, text)
        if self._is_terminal:
            seconds = time.perf_counter() - start
            self._note("(stopped)" if usage is None else f"({usage.completion_tokens} tokens, {usage.completion_tokens / seconds:.0f} a second)")

    def _help(self, _rest: str) -> None:
        for name, (text, _) in self._commands.items():
            self._note(f"/{name:8} {text}")

    def _reset(self, _rest: str) -> None:
        self._conversation.turns.clear()

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = rest
        else:
            self._note(self._conversation.system or "(no system message)")

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        if not text:
            for key, value in self._conversation.settings.items():
                self._note(f"{key} = {value}")
            if not self._conversation.settings or name:
                self._note("/set NAME VALUE, such as /set temperature 0.7")
            return
        self._conversation.set(name, text.strip())

    def _history(self, _rest: str) -> None:
        for message in self._conversation.messages:
            print(f"{message['role']}: {message['content']}", flush=True)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigurationError("/save needs the name of a file, such as /save talk.json.")
        try:
            Path(rest).expanduser().write_text(json.dumps({"messages": self._conversation.messages}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"{rest} can't be written ({reason}): choose another file.") from None
        self._note(f"saved {rest}")

    def _retry(self, _rest: str) -> None:
        turns = self._conversation.turns
        if not turns:
            raise ConfigurationError("There is no message to answer again: type one first.")
        last = turns[-2:]
        del turns[-2:]
        try:
            self._answer(last[0]["content"])
        except BaseException:
            turns += last
            raise

    def _quit(self, _rest: str) -> None:
        raise EOFError

    def _note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where the platform has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
