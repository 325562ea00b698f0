"""Any causal language model that transformers builds, through its own modules, with our cache and scheduler.

The way for architectures without a file of their own. Slower than those: nothing is packed, fused or captured. generic_layout.py says which models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.device import AnyBatch, Device
from pocketllm.torch_engine.models.generic_attention import NAME, MaskFunction, answering
from pocketllm.torch_engine.models.generic_check import check
from pocketllm.torch_engine.models.generic_layout import GenericLayout, quiet, read_layout
from pocketllm.torch_engine.weights import Weights


class Generic:
    """The model on one device; arguments and errors are those of model.ModelClass.

    The compute dtype is that of transformers' modules: float32 where none is asked for.
    """

    native_kernels = "not in use: the model runs through transformers' modules"
    is_capturable = captures_prompts = False  # what the modules do on the host is not known

    def __init__(self, checkpoint: Checkpoint, device: Device, max_model_len: int, on_layer: Callable[[int], None]) -> None:
        self._layout = layout = read_layout(checkpoint)
        if layout.steady_length is not None and max_model_len > layout.steady_length:
            raise UnsupportedFeatureError(
                f'"max_model_len" = {max_model_len} is not supported for {checkpoint.name}: past {layout.steady_length} tokens its rotary positions '
                f'("longrope") change for the whole context, which the cache holds already. Set max_model_len to {layout.steady_length} or less.',
                param="max_model_len",
            )
        if device.dtype == torch.float16 and device.device.type == "cpu":
            raise UnsupportedFeatureError(
                f'"dtype" = "float16" is not supported for {checkpoint.architecture} on a CPU, where it runs through transformers\' modules: '
                'use "auto", "float32" or "bfloat16".',
                param="dtype",
            )
        self.compute_dtype = device.dtype or torch.float32
        self._model = _load(checkpoint, layout, device.device, self.compute_dtype, on_layer)
        self._decoder = self._model.get_submodule(layout.decoder)
        self._layers = {self._model.get_submodule(name): index for index, name in enumerate(layout.attentions)}
        self._output_type: type[Any] | None = None
        check(self._model, layout, self, self.compute_dtype)

    @property
    def vocab_size(self) -> int:
        return self._layout.vocab_size

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return False

    def forward(self, batch: AnyBatch, cache: KVCache) -> torch.Tensor:
        with answering(_PagedAttention(self._layers, self._layout.windows, batch, cache)):
            return self.hidden(batch.token_ids, batch.positions)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states of packed tokens, [num_tokens, hidden_size] float32, by the attention in force."""
        output = self._decoder(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        self._output_type = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.squeeze(0).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # The head, and the scales and caps that some classes put behind it, are what the class computes around its decoder. So it is run with
        # a decoder that has the hidden states already.
        assert self._output_type is not None
        output = self._output_type(last_hidden_state=hidden.to(self.compute_dtype).unsqueeze(0))
        self._decoder.forward = lambda *args, **kwargs: output
        try:
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits.squeeze(0)
        finally:
            del self._decoder.forward
        return logits.float()


class _PagedAttention:
    """The attention of one step: keys and values go to their slots, and each token attends to its own row's.

    Args:
        layers: a layer's number by its attention module.
        windows: of each layer.
    """

    def __init__(self, layers: dict[nn.Module, int], windows: tuple[int | None, ...], batch: AnyBatch, cache: KVCache) -> None:
        self._layers, self._windows, self._batch, self._cache = layers, windows, batch, cache
        self._slots = batch.slot_mapping.long()  # without a graph no row stands for none, so all are slots

    def attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> torch.Tensor:
        layer, dtype = self._layers[module], self._cache.dtype
        queries, keys, values = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))  # [num_tokens, heads, head_dim]
        padding = keys.shape[-1] - values.shape[-1]
        if padding:  # the cache has room for values as wide as keys; zeros beside narrower ones come out as zeros
            values = F.pad(values, (0, padding))
        self._cache.write(layer, self._slots, keys, values)
        attended = self._over_cache(queries, layer, arguments.get("scaling"))
        attended = attended.view(len(attended), -1, keys.shape[-1])
        return attended[..., : attended.shape[-1] - padding].to(query.dtype).contiguous().unsqueeze(0)

    def _over_cache(self, queries: torch.Tensor, layer: int, scale: float | None) -> torch.Tensor:
        """queries [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        batch, window = self._batch, self._windows[layer]
        if isinstance(batch, Batch):
            return paged_attention(queries, self._cache, layer, batch, scale, window)
        from pocketllm.torch_engine.layers.gpu import attend  # Triton, which a CPU does without

        return attend(queries.contiguous(), self._cache.blocks[layer], batch, queries.shape[-1] ** -0.5 if scale is None else scale, window)

    def mask(self, function: MaskFunction, num_tokens: int) -> torch.Tensor:
        raise AssertionError("models ask for masks only while they are probed")


def _load(checkpoint: Checkpoint, layout: GenericLayout, device: torch.device, dtype: torch.dtype, on_layer: Callable[[int], None]) -> PreTrainedModel:
    """transformers' model with the checkpoint's weights, all of them and no others."""
    weights = Weights(checkpoint, lambda name: name)
    total, done, layer = checkpoint.num_bytes, 0, 0
    tensors: dict[str, torch.Tensor] = {}
    for info in checkpoint.tensors:
        if info.name.endswith("_scale_inv"):  # taken with the FP8 weight that it belongs to; without one, finish() names it
            continue
        stored = weights.take(info.name, info.shape)
        # Of another dtype, transformers makes its own copy, or keeps it where a model needs that; else it would read from the mapped file.
        of_dtype = stored.values is not None and stored.scales is None and stored.values.dtype != dtype
        tensors[info.name] = stored.values if of_dtype and stored.values is not None else stored.to(dtype)
        done += info.num_bytes
        if done * layout.num_layers // total > layer:
            layer = done * layout.num_layers // total
            on_layer(layer)
    weights.finish()
    config = layout.config.__class__.from_dict({key: value for key, value in layout.config.to_dict().items() if key != "quantization_config"})
    try:
        with quiet():
            loaded: Any = layout.build.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=NAME, output_loading_info=True)
    except RuntimeError as error:  # shapes that differ, or weights that could not be brought into the form of the modules
        raise ConfigurationError(
            f"The weights of {checkpoint.path} do not suit its config.json ({_line(error)}): download the model again.", param="model"
        ) from error
    model: PreTrainedModel = loaded[0].to(device)
    report: dict[str, set[str]] = loaded[1]
    for kind, words in (("missing_keys", "lacks the tensor"), ("unexpected_keys", "holds a tensor that the model has no place for,")):
        if report[kind]:
            names = sorted(report[kind])
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigurationError(f"{checkpoint.path} {words} {names[0]}{more}: download the model again.", param="model")
    weights.release()
    return model


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
