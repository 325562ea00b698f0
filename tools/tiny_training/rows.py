"""Conversations as token ids, with what of them is learnt, in batches that several processes prepare."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .conversation import SKILL_NAMES, Conversation, draw_conversation
from .source import Source
from .vocabulary import END_OF_TEXT, load_template, render

# An assistant's turn: what the prompt ends with, then what the model writes.
_TURN = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n\n</think>\n\n|<think>\n)?(.*?<\|im_end\|>)", re.DOTALL)
_WIDTH = 64  # rows are padded to a multiple of it
MAX_TOKENS = 768


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation.

    Args:
        ids: of its text.
        weights: of each id as something to predict; 0 for what the assistant does not write. The ids of one turn weigh the square root of their number in all.
        skills: of each id, 1 + the index in SKILL_NAMES of the turn that it is written in, else 0.
    """

    ids: list[int]
    weights: list[float]
    skills: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side, padded at the end. All arrays are [rows, width]: int16, float32, uint8.

    Args:
        ids, weights, skills: as in Row.
        num_tokens: without the padding.
    """

    ids: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float32]
    skills: npt.NDArray[np.uint8]
    num_tokens: int


def encode(tokenizer: Tokenizer, text: str, conversation: Conversation) -> Row:
    """The row of a conversation that was rendered to `text`."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    row = Row(encoding.ids, [0.0] * len(encoding.ids), [0] * len(encoding.ids))
    places = iter(enumerate(encoding.offsets))
    place, (start, end) = next(places)
    for turn, skill in zip(_TURN.finditer(text), conversation.skills, strict=True):
        while start < turn.start(1):
            place, (start, end) = next(places)
        first = place
        while end < turn.end(1):
            place, (start, end) = next(places)
        count = place + 1 - first
        row.weights[first : place + 1] = [count**-0.5] * count
        row.skills[first : place + 1] = [1 + SKILL_NAMES.index(skill)] * count
    return row


class BatchMaker:
    """Draws the steps of a run by number.

    Args:
        tokenizer: tokenizer.json's text.
        rows: of each step.
        seed: of the run.
    """

    def __init__(self, tokenizer: str, rows: int, seed: int) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._template = load_template()
        self._rows = rows
        self._seed = seed
        self._padding = self._tokenizer.token_to_id(END_OF_TEXT)

    def step(self, number: int) -> list[Batch]:
        """The rows of a step, the shorter two thirds apart from the longer ones: a row costs what the longest beside it does."""
        rows: list[Row] = []
        draw = 0
        while len(rows) < self._rows:
            conversation = draw_conversation(Source(f"training {self._seed} {number} {draw}"))
            draw += 1
            row = encode(self._tokenizer, render(self._template, conversation), conversation)
            if len(row.ids) <= MAX_TOKENS:
                rows.append(row)
        rows.sort(key=lambda row: len(row.ids))
        cut = len(rows) * 2 // 3
        return [self._pad(part) for part in (rows[:cut], rows[cut:]) if part]

    def _pad(self, rows: list[Row]) -> Batch:
        width = -(-max(len(row.ids) for row in rows) // _WIDTH) * _WIDTH
        shape = (len(rows), width)
        ids, weights, skills = np.full(shape, self._padding, np.int16), np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
        for index, row in enumerate(rows):
            length = len(row.ids)
            ids[index, :length], weights[index, :length], skills[index, :length] = row.ids, row.weights, row.skills
        return Batch(ids, weights, skills, sum(len(row.ids) for row in rows))


_maker: BatchMaker | None = None  # of a worker process


def _start_worker(tokenizer: str, rows: int, seed: int) -> None:
    global _maker
    _maker = BatchMaker(tokenizer, rows, seed)


def _work(number: int) -> list[Batch]:
    assert _maker is not None
    return _maker.step(number)


def draw_steps(tokenizer: Tokenizer, rows: int, seed: int, workers: int) -> Generator[list[Batch], None, None]:
    """The batches of each step of a run, without end and always in the same order, however many processes make them."""
    context = get_context("spawn")  # a process that has begun to use a GPU must not be forked
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.to_str(), rows, seed)) as pool:
        waiting: deque[Future[list[Batch]]] = deque()
        number = 0
        try:
            while True:
                while len(waiting) < 4 * workers:
                    waiting.append(pool.submit(_work, number))
                    number += 1
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
