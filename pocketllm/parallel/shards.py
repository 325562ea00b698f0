"""Whether the heads and widths of a model can be dealt out to ranks, decided from its config. Both planes cut in the same places."""

from __future__ import annotations

from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import UnsupportedFeatureError

# config.json's names of what every rank has an equal share of. A model has some of them.
_DEALT_OUT = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def check_shards(args: EngineArgs, checkpoint: Checkpoint) -> None:
    """Refuse a number of ranks that the model's heads and widths don't divide by.

    Raises:
        UnsupportedFeatureError: naming the key of the config, and the numbers of ranks that do.
    """
    size = args.tensor_parallel_size
    if size == 1:
        return
    counts = {name: count for name in _DEALT_OUT if type(count := checkpoint.config.get(name)) is int and count > 0}
    for name, count in counts.items():
        if count % size:
            possible = [str(other) for other in range(1, max(counts.values()) + 1) if all(one % other == 0 for one in counts.values())]
            raise UnsupportedFeatureError(
                f'"tensor_parallel_size" = {size} does not divide {name} = {count} of {checkpoint.name}: send one of {", ".join(possible)}.',
                param="tensor_parallel_size",
            )
