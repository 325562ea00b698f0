"""What the model runner and the backend ask of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.device import AnyBatch, Device


class Model(Protocol):
    """A loaded model on one device.

    Attributes:
        vocab_size: columns of the logits.
        compute_dtype: of the products, as the device describes it.
        native_kernels: whether the native kernels are in use, or why not, in a few words for people.
        captures_prompts: a CUDA graph can hold steps with prompts too, where it can hold any.
    """

    compute_dtype: torch.dtype
    native_kernels: str
    captures_prompts: bool

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold a step of rows that decode: nothing in it waits for the device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        """Whether the rows of `batch` that decode run in the native step, which has threads of its own."""

    def forward(self, batch: AnyBatch, cache: KVCache) -> torch.Tensor:
        """Compute a step's tokens, writing their keys and values to `cache`. Returns [num_tokens, hidden_size] float32."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] float32 -> [num_rows, vocab_size] float32."""


class ModelClass(Protocol):
    """How a model is built.

    Args:
        checkpoint: an open checkpoint of its architecture.
        device: builds the layers and says in which dtype they compute; the residual stream and the logits are float32 under each.
        max_model_len: positions are below this.
        on_layer: called after each loaded layer with the number loaded.

    Raises:
        ConfigurationError: a key of the config is missing, or a tensor is missing, left over, or has another shape than the config says.
        UnsupportedFeatureError: the config asks for a variant that the model does not compute.
    """

    def __call__(self, checkpoint: Checkpoint, device: Device, max_model_len: int, on_layer: Callable[[int], None]) -> Model: ...
