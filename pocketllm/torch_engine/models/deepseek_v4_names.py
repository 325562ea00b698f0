"""What files call the tensors of deepseek_v4. The names that the model uses are those of the published safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable

from pocketllm.checkpoint import Checkpoint

# As transformers saves them, where they differ by more than a prefix.
_TRANSFORMERS_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_GGUF_NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
_GGUF_LAYER_NAMES = {
    **{f"hc_{site}_{part}": f"hc_{site}_{part}.weight" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{f"ffn.shared_experts.{name}.weight": f"ffn_{kind}_shexp.weight" for name, kind in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    **{f"ffn.experts.{name}.weight": f"ffn_{kind}_exps.weight" for name, kind in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
}
_PREDICTOR = re.compile(r"(?:model\.)?mtp\.|blk\.(\d+)\.")


def file_name(checkpoint: Checkpoint) -> Callable[[str], str]:
    """The file's name of a tensor, from the model's."""
    if checkpoint.gguf is not None:
        return gguf_name
    names = {tensor.name for tensor in checkpoint.tensors}
    if any(name.startswith("model.layers.") for name in names):
        return lambda name: _TRANSFORMERS_NAMES.get(name, f"model.{_short(name)}")
    return lambda name: _short(name) if _short(name) in names else name


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor. It has one tensor for all routed experts of a layer, the model's name of which has no number."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[rest]}"


def predictor_names(checkpoint: Checkpoint) -> frozenset[str]:
    """The file's tensors of the layers that predict further tokens; in a GGUF those that follow the num_hidden_layers others."""
    first, count = checkpoint.config["num_hidden_layers"], checkpoint.config.get("num_nextn_predict_layers", 0)
    found = ((tensor.name, _PREDICTOR.match(tensor.name)) for tensor in checkpoint.tensors)
    return frozenset(name for name, match in found if match is not None and (match[1] is None or first <= int(match[1]) < first + count))


def _short(name: str) -> str:
    """As transformers spells the norm of keys and values when it saves them."""
    return name.replace(".attn.kv_norm.", ".attn.norm.")
