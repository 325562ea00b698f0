"""The text of a conversation, for a checkpoint with a chat template and for one without, ended where the answer is to begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.messages import render_role_content
from pocketllm.text.chat_template import PromptFormat

_MARK = "\ufdd0"  # no character, so that no text has a run of it by chance


def render_conversation(template: PromptFormat | None, variables: Mapping[str, Any], *, continues: bool) -> str:
    """The prompt.

    Args:
        template: of the checkpoint, or None when it has none.
        variables: what the template is given, "messages" among them.
        continues: whether it ends with the text of the last message, as that is, in place of the end of its turn.

    Raises:
        ConfigurationError: the template refuses the messages, or does not show the last one as it is.
    """
    if not continues:
        return _render(template, variables)
    *earlier, last = variables["messages"]
    mark = _MARK * (1 + max((len(run) for run in _runs(last["content"])), default=0))
    text = _render(template, {**variables, "messages": [*earlier, {**last, "content": last["content"] + mark}]})
    end = text.rfind(mark)
    if end < 0:
        raise ConfigurationError(
            "\"continue_final_message\" = true can't hold: the model's chat template leaves the last message out. Leave it out.", param="continue_final_message"
        )
    return text[:end]


def _render(template: PromptFormat | None, variables: Mapping[str, Any]) -> str:
    if template is not None:
        return template.render(**variables)
    return render_role_content(variables["messages"], add_generation_prompt=variables["add_generation_prompt"])


def _runs(text: str) -> list[str]:
    """The runs of the mark's character in `text`."""
    return [run for run in "".join(character if character == _MARK else " " for character in text).split() if run] if _MARK in text else []
