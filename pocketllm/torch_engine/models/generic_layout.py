"""What the generic path must know of a transformers model, found by running its modules without weights; or why it can't run them.

The model is built on torch's meta device, where tensors have shapes and no values, and computes one forward pass whose attention and masks
are recorded. What is accepted is what was seen to be plain attention: once a layer, on keys and values of one shape, causal, at most with a
sliding window, and with nothing added to the scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.models.generic_attention import PROBED, MaskFunction, answering

_CRITICAL = 50  # of Python's logging
_PROBE_TOKENS = 16
# What modules pass to their attention function and what says nothing of the scores, or is off when it has the value named here.
_HARMLESS = frozenset(
    {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "position_embeddings", "cache_position", "use_cache", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_idx"}
)
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WORDS = {"softcap": "a soft cap on attention scores", "s_aux": "attention sinks", "indices": "sparse attention, which picks tokens by an indexer of its own"}


@dataclass(frozen=True, slots=True)
class GenericLayout:
    """A model that the generic path runs.

    Args:
        config: transformers' own, whole.
        build: its class for causal language models.
        decoder: name of the module within it that turns ids into hidden states; what the class does after it makes logits of them.
        attentions: names of the attention modules, a layer each, in the order of the layers.
        windows: tokens that a token of each layer attends to, itself included; None is all.
        num_kv_heads, head_dim: of the cached keys. Values may be narrower.
        vocab_size: columns of the logits.
        steady_length: positions from here on change the rotation of all the others, so a context must end before; None is nowhere.
    """

    config: PreTrainedConfig
    build: type[PreTrainedModel]
    decoder: str
    attentions: tuple[str, ...]
    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    steady_length: int | None

    @property
    def num_layers(self) -> int:
        return len(self.attentions)


class _Refusal(Exception):
    """Why a model can't be run, in half a sentence for people."""


def read_layout(checkpoint: Checkpoint) -> GenericLayout:
    """The layout of a safetensors checkpoint.

    Raises:
        UnsupportedFeatureError: this path does not run the model.
    """
    found = _examined(checkpoint.path, checkpoint.architecture, _stamp(checkpoint.path))
    if isinstance(found, str):
        raise UnsupportedFeatureError(
            f"{checkpoint.path} can't be run: the architecture {checkpoint.architecture!r} is not supported, since {found}.", param="model"
        )
    return found


def layout_obstacle(checkpoint: Checkpoint) -> str | None:
    """Why this path does not run a safetensors checkpoint, in half a sentence for people; None where it does."""
    found = _examined(checkpoint.path, checkpoint.architecture, _stamp(checkpoint.path))
    return found if isinstance(found, str) else None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, warnings and reports: what matters in them is raised here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _stamp(path: Path) -> int:
    file = path / "config.json"
    return file.stat().st_mtime_ns if file.exists() else 0


@lru_cache(maxsize=4)  # asked for when the plane is chosen, when the cache is planned and when the model is built
def _examined(path: Path, architecture: str, stamp: int) -> GenericLayout | str:
    try:
        with quiet():
            return _examine(path, architecture)
    except _Refusal as refusal:
        return str(refusal)


def _examine(path: Path, architecture: str) -> GenericLayout:
    if architecture not in CONFIG_MAPPING:
        raise _Refusal(f"transformers {transformers.__version__} does not know it")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, all of them about config.json
        raise _Refusal(f"its config.json is not accepted ({_first_line(error)})") from error
    if getattr(config, "is_encoder_decoder", False):
        raise _Refusal("it is an encoder-decoder model")
    build: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if build is None:
        raise _Refusal("transformers has no causal language model of it")
    if getattr(build, "_is_stateful", False):
        raise _Refusal("its layers keep a recurrent state beside or in place of keys and values")
    if "position_ids" not in inspect.signature(build.forward).parameters:
        raise _Refusal("its positions can't be passed, so sequences can't be packed")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    if other := next((kind for kind in kinds if kind not in _LAYER_TYPES), None):
        raise _Refusal(f"it has layers of the type {other!r}")
    model, recorder, output, decoder = _probe(config, build)
    names = {module: name for name, module in model.named_modules()}
    calls = recorder.calls
    _check_layers(calls, [names[call.module] for call in calls], int(getattr(text, "num_hidden_layers", len(calls))))
    shapes = {(call.query[1], call.query[3], call.key[1], call.key[3], call.value[1], call.value[3]) for call in calls}
    if len({shape[2:] for shape in shapes}) > 1:
        raise _Refusal("its layers have keys and values of different shapes")
    num_heads, query_dim, num_kv_heads, key_dim, num_value_heads, value_dim = next(iter(shapes))
    if query_dim != key_dim or value_dim > key_dim or num_kv_heads != num_value_heads or num_heads % num_kv_heads:
        raise _Refusal(f"its attention has {num_heads} query heads of {query_dim}, {num_kv_heads} key heads of {key_dim}, {num_value_heads} of {value_dim}")
    return GenericLayout(
        config,
        build,
        decoder,
        tuple(names[call.module] for call in calls),
        tuple(call.window for call in calls),
        num_kv_heads,
        key_dim,
        int(output.logits.shape[-1]),
        _steady_length(text),
    )


def _check_layers(calls: list[_Call], names: list[str], num_layers: int) -> None:
    if not calls:
        raise _Refusal("its attention is not plain attention that transformers leaves to others to compute")
    seen = {call.module for call in calls}
    if len(seen) != len(calls):
        raise _Refusal(f"its modules compute attention {len(calls)} times with {len(seen)} sets of weights, so keys and values have no place of their own")
    if len(calls) != num_layers:
        raise _Refusal(f"{num_layers - len(calls)} of its {num_layers} layers are not plain attention")
    for call, name in zip(calls, names, strict=True):
        if call.obstacle is not None:
            raise _Refusal(f"{name} has {call.obstacle}")


@dataclass(frozen=True, slots=True)
class _Call:
    """One module's call of its attention function: shapes, the window that its mask has, and what in it is not plain attention."""

    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    window: int | None
    obstacle: str | None


@dataclass(slots=True)
class _Recorder:
    """Stands for the attention of a probe.

    Args:
        context: positions of the model.
    """

    context: int
    calls: list[_Call] = field(default_factory=list)
    _masks: dict[int, tuple[torch.Tensor, int | str | None]] = field(default_factory=dict)  # by id; the tensors are kept, so that an id stays its own

    def attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> torch.Tensor:
        window, obstacle = self._seen(module, mask, arguments)
        obstacle = obstacle or next((_named(name, value) for name, value in arguments.items() if name not in _HARMLESS and _counts(value)), None)
        if arguments.get("dropout"):
            obstacle = obstacle or "dropout, which belongs to training"
        if obstacle is None and key.shape[2] != query.shape[2]:
            obstacle = "keys that are not those of its tokens"
        self.calls.append(_Call(module, query.shape, key.shape, value.shape, window, obstacle))
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def mask(self, function: MaskFunction, num_tokens: int) -> torch.Tensor:
        mask = torch.empty((1, 1, num_tokens, num_tokens), dtype=torch.bool, device="meta")
        with torch.device("cpu"):  # here values count
            self._masks[id(mask)] = (mask, _window_of(function, self.context))
        return mask

    def _seen(self, module: nn.Module, mask: Any, arguments: dict[str, Any]) -> tuple[int | None, str | None]:
        """The window of a call, and why what it sees is not that of plain attention."""
        if mask is None:
            causal = arguments.get("is_causal")
            if not (getattr(module, "is_causal", False) if causal is None else causal):
                return None, "no causal mask"
            return arguments.get("sliding_window"), None
        if id(mask) not in self._masks:
            return None, "a bias on its attention scores, or a mask of its own"
        window = self._masks[id(mask)][1]
        return (None, window) if isinstance(window, str) else (window, None)


def _probe(config: PreTrainedConfig, build: type[PreTrainedModel]) -> tuple[PreTrainedModel, _Recorder, Any, str]:
    """One forward pass without weights: the model, what it asked for, its output, and the name of its decoder."""
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    if type(context) is not int or context < _PROBE_TOKENS:
        raise _Refusal(f"its config.json has no max_position_embeddings of at least {_PROBE_TOKENS}")
    decoders: list[nn.Module] = []  # modules that returned hidden states, the outermost last

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if getattr(output, "last_hidden_state", None) is not None:
            decoders.append(module)

    recorder = _Recorder(context)
    try:
        with torch.device("meta"), torch.inference_mode(), answering(recorder):
            # A loop over experts depends on values; this form of it does not.
            model = build._from_config(config, attn_implementation=PROBED, experts_implementation="batched_mm").eval()
            handles = [module.register_forward_hook(note) for module in model.modules() if module is not model]
            ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64)
            positions = torch.arange(_PROBE_TOKENS).unsqueeze(0)
            # Without a mask of padding, transformers looks for packed sequences in the values of the positions.
            output = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
        for handle in handles:
            handle.remove()
    except Exception as error:  # whatever a module of theirs does that needs values, or another package
        raise _Refusal(f"its modules can't be examined without weights ({type(error).__name__}: {_first_line(error)})") from error
    if not decoders:
        raise _Refusal("it has no decoder apart from its output head")
    return model, recorder, output, next(name for name, module in model.named_modules() if module is decoders[-1])


def _window_of(function: MaskFunction, context: int) -> int | str | None:
    """The window that a mask has in a context of so many tokens, None where a token sees all before it; or, in words, why it is no window."""
    window: int | None = None
    # From the end to the beginning: the last token shows how wide the window is, and the others have to agree.
    for query in sorted({context - 1, context - context // 3, context // 2, context // 5, 63 % context, 7, 1, 0}, reverse=True):
        keys = torch.arange(min(query + 8, context))
        try:
            zero = torch.tensor(0)
            seen = torch.broadcast_to(function(zero, zero, torch.tensor(query), keys), keys.shape).tolist()
        except Exception as error:  # made for something else than indices, or it reads tensors of the probe
            return f"a mask that can't be examined ({_first_line(error)})"
        if query == context - 1:
            count = sum(seen)
            window = None if count == context else count
        first = 0 if window is None else max(0, query + 1 - window)
        if seen != [first <= key <= query for key in range(len(seen))]:
            return "a mask that is neither causal nor a sliding window"
    return window


def _counts(value: Any) -> bool:
    return value is not None and value is not False


def _named(name: str, value: Any) -> str:
    return _WORDS.get(name, f"{name} in its attention, which is not computed here")


def _steady_length(config: PreTrainedConfig) -> int | None:
    """Up to where rotations do not depend on the longest position of a batch: longrope turns another way from there on."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return None
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, Mapping))]
    return min((int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"), default=None)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] if lines else type(error).__name__
