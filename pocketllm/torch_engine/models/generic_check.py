"""Whether a model computes packed pieces of sequences as it computes each sequence whole, tried on its weights when it has loaded.

The probe of generic_layout.py sees what modules ask for; this sees what they compute. A module that mixes neighbouring tokens by itself, or
places tokens by where they stand, would answer wrongly in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.models.generic_attention import NAME, MaskFunction, answering
from pocketllm.torch_engine.models.generic_layout import GenericLayout

_LENGTHS = (9, 6)
_CUTS = (5, 2)  # each sequence comes in two pieces
# Median over a piece's tokens of the largest error, relative to the largest logit: one expert that is chosen otherwise is no failure.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


class Steps(Protocol):
    """What is tried: a model that is computed in two parts."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(slots=True)
class _Row:
    """Tokens of one sequence in a packed pass, and the keys and values of its earlier ones by layer."""

    tokens: slice
    keys: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    values: dict[nn.Module, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Unpaged:
    """Attention of packed rows over keys and values in plain tensors; `windows` are those of the attention modules."""

    rows: list[_Row]
    windows: dict[nn.Module, int | None]

    def attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> torch.Tensor:
        parts = []
        for row in self.rows:
            keys, values = key[:, :, row.tokens], value[:, :, row.tokens]
            if module in row.keys:
                keys, values = torch.cat([row.keys[module], keys], 2), torch.cat([row.values[module], values], 2)
            row.keys[module], row.values[module] = keys, values
            queries = query[:, :, row.tokens]
            before, window = keys.shape[2] - queries.shape[2], self.windows[module]
            seen = torch.ones((queries.shape[2], keys.shape[2]), dtype=torch.bool, device=query.device).tril(before)
            if window is not None:
                seen = seen.triu(before + 1 - window)
            parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=arguments.get("scaling"), enable_gqa=True))
        return torch.cat(parts, 2).transpose(1, 2).contiguous()

    def mask(self, function: MaskFunction, num_tokens: int) -> torch.Tensor:
        raise AssertionError("models ask for masks only while they are probed")


def check(model: PreTrainedModel, layout: GenericLayout, steps: Steps, dtype: torch.dtype) -> None:
    """Compare two sequences, packed and in pieces, with transformers' own forward of each.

    Raises:
        UnsupportedFeatureError: they differ.
    """
    device = next(model.parameters()).device
    count = min(layout.vocab_size, 1000)
    sequences = [torch.arange(3, 3 + 7 * length, 7, device=device) % count for length in _LENGTHS]
    model.set_attn_implementation("eager")
    wanted = [model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float() for ids in sequences]
    model.set_attn_implementation(NAME)
    rows = [_Row(slice(0, 0)) for _ in sequences]
    windows = {model.get_submodule(name): window for name, window in zip(layout.attentions, layout.windows, strict=True)}
    for piece in range(2):
        spans = [(0, cut) if piece == 0 else (cut, length) for cut, length in zip(_CUTS, _LENGTHS, strict=True)]
        start = 0
        for row, (first, end) in zip(rows, spans, strict=True):
            row.tokens = slice(start, start + end - first)
            start += end - first
        ids = torch.cat([sequence[first:end] for sequence, (first, end) in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(first, end, device=device) for first, end in spans])
        with answering(_Unpaged(rows, windows)):
            found = steps.logits(steps.hidden(ids, positions))
        for row, logits, (first, end) in zip(rows, wanted, spans, strict=True):
            part = logits[first:end]
            errors = (found[row.tokens] - part).abs().amax(-1) / part.abs().amax(-1).clamp(min=1e-6)
            if not float(errors.median()) <= _TOLERANCE[dtype]:
                raise UnsupportedFeatureError(
                    f"{layout.config.model_type} is not run through transformers' modules: a token's logits depend on what it is computed together with, "
                    f"not only on the tokens before it (they differ by {float(errors.median()):.1%}).",
                    param="model",
                )
