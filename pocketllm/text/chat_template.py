"""The checkpoint's own chat template: messages to prompt text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.hf_config import read_json
from pocketllm.text.deepseek_v4 import DEEPSEEK_V4_TYPES, DeepseekV4Prompt
from pocketllm.text.special_tokens import special_tokens
from pocketllm.text.template_traits import adapt, find_traits


class PromptFormat(Protocol):
    """What makes a conversation into a prompt: a checkpoint's chat template, or what stands in for it.

    Args:
        source: the template's text, or none.
        renders_tools: whether tool definitions show in the prompt.
    """

    @property
    def source(self) -> str: ...

    @property
    def renders_tools(self) -> bool: ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt for normalized `messages`, ready to be tokenized without added special tokens."""


class ChatTemplate:
    """A compiled Jinja template, rendered in a sandbox because it came with a download. Safe to use from several threads.

    Args:
        source: the template's text.
        special_tokens: variables such as bos_token.

    Raises:
        ConfigurationError: the text is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)  # of its own: compiling folds constants into the one that it is given
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, AssertionError, OverflowError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ConfigurationError(
                f"The model's chat template is not valid Jinja{where}: {_one_line(error)}. Download the model again.", param="model"
            ) from None
        self.traits = find_traits(self._render, tree)

    @property
    def renders_tools(self) -> bool:
        """Whether tool definitions show in the prompt."""
        return self.traits.renders_tools

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt for `messages`, ready to be tokenized without added special tokens.

        Args:
            messages: normalized; they are copied, never changed. What the template would drop or refuse (calls, their results, the role "developer") is
                put into turns that it keeps.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: tool definitions in OpenAI's form.
            options: further variables of the template, such as enable_thinking. A reasoning_effort becomes the nearest word that the template knows.

        Raises:
            ConfigurationError: the template refuses the messages, or fails on them; `param` is "messages" and the message has the template's text.
        """
        if "reasoning_effort" in options:
            effort = self.traits.efforts.get(options["reasoning_effort"], options["reasoning_effort"])
            options = {**options, "reasoning_effort": effort} if effort is not None else {key: options[key] for key in options if key != "reasoning_effort"}
        return self._render(adapt(messages, self.traits), add_generation_prompt=add_generation_prompt, tools=tools or None, **options)

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        given = {"add_generation_prompt": True, "tools": None, **self._variables, **options}
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = self._template.render({**{name: _plain(value) for name, value in given.items()}, "messages": _plain(chat)})
            text.encode()  # half of a surrogate pair, from a tool's description, is no text that a tokenizer could read
            return text
        except _Refusal as error:
            raise ConfigurationError(f"The model's chat template refuses the messages: {_one_line(error)}", param="messages") from None
        except Exception as error:  # a template is a program from a download: whatever it raises is about its input
            raise ConfigurationError(
                f"The model's chat template fails on these messages ({type(error).__name__}: {_one_line(error)}): check their roles and contents.",
                param="messages",
            ) from error


def load_chat_template(checkpoint: Checkpoint) -> PromptFormat | None:
    """The template of `checkpoint`, or None when it has none, as a base model. DeepSeek-V4 has a prompt format that no template spells out.

    A directory's chat_template.jinja wins over tokenizer_config.json, as in transformers; of a list of templates "default" is taken.

    Raises:
        ConfigurationError: a file is corrupt, or the template is not valid Jinja.
    """
    source = _directory_source(checkpoint) if checkpoint.gguf is None else checkpoint.gguf.metadata.get("tokenizer.chat_template")
    if source is None:
        return DeepseekV4Prompt() if checkpoint.architecture in DEEPSEEK_V4_TYPES else None
    if not isinstance(source, str):
        raise ConfigurationError(f"{checkpoint.path} has a chat template that is no text: download it again.", param="model")
    return ChatTemplate(source, special_tokens(checkpoint).as_dict())


def _directory_source(checkpoint: Checkpoint) -> Any:
    file = checkpoint.path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{file} can't be read ({_one_line(error)}): download it again.", param="model") from None
    config = checkpoint.path / "tokenizer_config.json"
    if not config.exists():
        return None
    source = read_json(config, "download it again").get("chat_template")
    if not isinstance(source, list):
        return source
    named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if "default" not in named:
        raise ConfigurationError(
            f"{config} has the chat templates {', '.join(map(str, named)) or 'of no name'} and no default: write the right one to {file}.", param="model"
        )
    return named["default"]


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without attributes that begin with an underscore, which the sandbox does not see on assignment."""

    def __init__(self, /, **attributes: Any) -> None:
        for name in attributes:
            _check_name(name)
        super().__init__(**attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %}, which marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        dict=lambda *args, **items: dict(*args, **items),  # a function has no attributes that the sandbox would let through
        namespace=_Namespace,
    )
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML and non-ASCII text, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """A copy made of JSON's types alone: a template must not reach the methods of a caller's objects."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
