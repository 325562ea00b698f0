"""transformers' Llama on the weights of a GGUF file, dequantized by the gguf package: the oracle of the torch plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


@dataclass(frozen=True)
class BestTokens:
    """By position: the oracle's best id, and how many nats its second best is behind."""

    ids: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Oracle:
    """A float32 Llama of transformers. It remembers what it computed: the same ids are often asked for again."""

    model: LlamaForCausalLM
    _best: dict[tuple[int, ...], BestTokens] = field(default_factory=dict)

    @torch.inference_mode()
    def best(self, token_ids: list[int], last: int) -> BestTokens:
        """The two best tokens after each of the `last` last of `token_ids`."""
        key = (last, *token_ids)
        if key not in self._best:
            logits = self.model(torch.tensor([token_ids]), logits_to_keep=last).logits[0]  # [last, vocab_size]
            values, ids = logits.topk(2)
            self._best[key] = BestTokens(ids[:, 0].tolist(), (values[:, 0] - values[:, 1]).tolist())
        return self._best[key]

    def check_greedy(self, prompt: list[int], generated: list[int], allowance: float = 0.0) -> int | None:
        """Assert that `generated` is the greedy continuation of `prompt`.

        One pass over both decides it: where each generated id is the oracle's best after what precedes it, the oracle would
        have generated the same. With an `allowance`, the first difference must start where the oracle's two best tokens are
        within so many nats, and what follows is not compared.

        Returns:
            The place of the first difference, or None.
        """
        best = self.best([*prompt, *generated[:-1]], len(generated))
        for place, (token_id, expected, gap) in enumerate(zip(generated, best.ids, best.gaps, strict=True)):
            if token_id != expected:
                assert gap <= allowance, f"differs at {place}, where the oracle's two best are {gap:.4f} nats apart"
                return place
        return None


def load_oracle(path: Path) -> Oracle:
    """Read `path` with the gguf package alone; nothing of pocketllm is used."""
    reader = gguf.GGUFReader(path)

    def number(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
    tensors = {tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).float() for tensor in reader.tensors}
    config = LlamaConfig(
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        max_position_embeddings=int(number("context_length")),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = LlamaForCausalLM(config).eval()
    state = {_hf_name(name): _halves(tensor, name, heads, kv_heads) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return Oracle(model)


def _hf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _halves(tensor: torch.Tensor, name: str, heads: int, kv_heads: int) -> torch.Tensor:
    """GGUF stores the values that rotary embedding pairs as neighbours, transformers as the two halves of a head."""
    count = heads if ".attn_q." in name else kv_heads if ".attn_k." in name else 0
    if not count:
        return tensor
    return tensor.reshape(count, tensor.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
