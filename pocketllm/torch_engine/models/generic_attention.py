"""Where transformers' modules ask for attention: whoever computes one of their forward passes answers.

transformers looks an attention function up by name. Ours, under two names, hands each call to the `Attention` in force. Under PROBED a model
also asks for its masks; under NAME it asks for none, since what each layer may see is known from the probe (generic_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "pocketllm"
PROBED = "pocketllm_probed"

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(Protocol):
    """What computes, or records, the attention of one forward pass."""

    def attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> torch.Tensor:
        """query [1, num_heads, num_tokens, head_dim], key and value [1, num_kv_heads, num_tokens, ...] -> [1, num_tokens, num_heads, value_dim].

        Args:
            module: the attention module that asks.
            mask: what it passed as its mask.
            arguments: what else it passed, by keyword.
        """

    def mask(self, function: MaskFunction, num_tokens: int) -> torch.Tensor:
        """The mask of a pass over `num_tokens` tokens, for modules that are probed. `function` says, by batch, head, query and key, what is seen."""


_in_force: ContextVar[Attention] = ContextVar("attention")


@contextmanager
def answering(attention: Attention) -> Iterator[None]:
    """Within this, `attention` answers modules that were built under NAME or PROBED."""
    token = _in_force.set(attention)
    try:
        yield
    finally:
        _in_force.reset(token)


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    return _in_force.get().attend(module, query, key, value, attention_mask, arguments), None


def _mask(*, mask_function: MaskFunction, q_length: int, **_: Any) -> torch.Tensor:
    return _in_force.get().mask(mask_function, q_length)


AttentionInterface.register(NAME, _attend)
AttentionInterface.register(PROBED, _attend)
AttentionMaskInterface.register(PROBED, _mask)
