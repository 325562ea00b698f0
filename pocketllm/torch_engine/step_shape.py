"""The sizes that a step's launches depend on, and those for which steps are captured. Plain ints, no tensors.

A step may be computed in a shape that is larger than it is: what is missing is filled with rows and tokens that stand for none. So a few shapes,
each captured once as a CUDA graph, serve all steps that are short enough for the host's launches to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.torch_engine.kernels.chunk_plan import CHUNK, num_chunks
from pocketllm.torch_engine.scheduler import ScheduledRow

_PROMPT_ROWS = 8  # prompts of a captured step; one that has more of them is launched kernel by kernel
_MOST_ALONE = 1024  # prompt tokens of a captured step without answers; longer ones take the device more time than the host
_ALONE = (64, 128, 256, 384, 512, 768, _MOST_ALONE)
_TOKENS_BESIDE = 384  # of a step with answers and prompts, all together: what tiles of 128 rows divide, at about twice the time of answers alone
_LEAST_BESIDE = 256  # prompt tokens that many answers leave


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step.

    Args:
        num_decode: rows that compute one token.
        num_prompts: other rows.
        num_prompt_tokens: of those together.
        longest_prompt: tokens of the longest of those.
        num_chunks: of those together, see ChunkPlan.
        num_samples: rows that sample.
        is_padded: steps of fewer rows and tokens are computed in it.
    """

    num_decode: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    longest_prompt: int = 0
    num_chunks: int = 0
    num_samples: int = 0
    is_padded: bool = False

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> StepShape:
        """Just that of `rows`."""
        lengths = [one.num_tokens for one in rows if one.num_tokens != 1]
        return cls(
            len(rows) - len(lengths),
            len(lengths),
            sum(lengths),
            max(lengths, default=0),
            sum(num_chunks(length) for length in lengths),
            sum(one.samples for one in rows),
        )

    @classmethod
    def decoding(cls, num_rows: int) -> StepShape:
        """Of up to `num_rows` rows, all of which decode and sample."""
        return cls(num_rows, num_samples=num_rows, is_padded=True)

    @classmethod
    def filling(cls, num_decode: int, num_prompt_tokens: int, max_rows: int) -> StepShape:
        """Of up to `num_decode` rows that decode and, in a few other rows, `num_prompt_tokens` tokens of prompts; any of max_rows rows may sample."""
        prompts = min(_PROMPT_ROWS, max_rows)
        chunks = (num_prompt_tokens + prompts * (CHUNK - 1)) // CHUNK  # where each row's last chunk has a single token
        return cls(num_decode, prompts, num_prompt_tokens, num_prompt_tokens, chunks, min(num_decode + prompts, max_rows), is_padded=True)

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decode + self.num_prompt_tokens

    @property
    def all_sample(self) -> bool:
        """Whether there are just rows that decode, and each samples: then no token has to be picked."""
        return self.num_prompts == 0 and self.num_samples == self.num_decode

    def holds(self, other: StepShape) -> bool:
        """Whether a step of the shape `other` may be computed in this one."""
        return (
            other.num_decode <= self.num_decode
            and other.num_prompts <= self.num_prompts
            and other.num_prompt_tokens <= self.num_prompt_tokens
            and other.longest_prompt <= self.longest_prompt
            and other.num_chunks <= self.num_chunks
            and other.num_samples <= self.num_samples
            and (other.all_sample or not self.all_sample)
        )


def chunk_beside_answers(max_rows: int) -> int:
    """Prompt tokens of a step in which some row decodes, where nobody asked for a number: few enough that answers go on, and with all rows' answers as
    many as the products' tiles divide."""
    return max(_LEAST_BESIDE, _TOKENS_BESIDE - -(-max_rows // CHUNK) * CHUNK)


def captured_shapes(max_rows: int, most_alone: int, most_beside: int) -> list[StepShape]:
    """Shapes that get a CUDA graph of their own, the smallest first.

    Rows that stand for none cost little where there are few, and memory traffic where there are many. Beside a prompt's tokens, which the products take
    in tiles of 128, they cost less.

    Args:
        max_rows: most running rows.
        most_alone: most prompt tokens of a step in which no row decodes; 0 is any number.
        most_beside: and of one in which some row does, at least 1 or likewise 0.
    """
    sizes = {1, 2, 4, 8, *range(16, max_rows, 8 if max_rows <= 128 else 16), max_rows}
    shapes = [StepShape.decoding(size) for size in sizes if size <= max_rows]
    shapes += [StepShape.filling(0, tokens, max_rows) for tokens in _up_to(_ALONE, most_alone)]
    if max_rows > 1:
        for tokens in _up_to(range(chunk_beside_answers(max_rows), 0, -128)[::-1], most_beside):
            shapes += [StepShape.filling(rows, tokens, max_rows) for rows in _answers(max_rows)]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_prompt_tokens))


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Of `sizes`, those below `most`, and it as the last; all where `most` is 0 or more than any."""
    if most == 0 or most > sizes[-1]:
        return list(sizes)
    return [size for size in sizes if size < most] + [most]


def _answers(max_rows: int) -> list[int]:
    """Numbers of decoding rows beside prompts; whole multiples of 16, so that the prompts' part of an array begins where wide loads may."""
    last = -(-max_rows // 16) * 16
    return sorted({rows for rows in (16, 32, *range(64, last, 64 if last <= 256 else 128)) if rows < last} | {last})
