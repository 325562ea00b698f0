"""Stop sequences: where an answer ends because the caller said so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pocketllm.errors import ConfigurationError

MAX_CHARACTERS = 8192  # of all sequences together


class StopSequences:
    """The stop sequences of one request, as one automaton (Aho and Corasick, 1975) that its choices share.

    State s stands for a beginning of a sequence: the longest one that the text so far ends in.

    Args:
        sequences: at least one, none of them empty.

    Raises:
        ConfigurationError: they have more than MAX_CHARACTERS characters together; `param` is "stop".
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        size = sum(map(len, sequences))
        if size > MAX_CHARACTERS:
            raise ConfigurationError(
                f'"stop" holds {size} characters in {len(sequences)} sequences: at most {MAX_CHARACTERS} are matched. Send fewer, or shorter ones.',
                param="stop",
            )
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of the beginning
        self.ends = [0]  # length of the longest sequence that ends here, or 0
        for sequence in sequences:
            state = 0
            for character in sequence:
                if character not in self.next[state]:
                    self.next[state][character] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.ends.append(0)
                state = self.next[state][character]
            self.ends[state] = len(sequence)
        self.shorter = self._link()

    def _link(self) -> list[int]:
        """For each state, that of the longest other beginning which its text ends in."""
        shorter = [0] * len(self.next)
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.ends[state] = self.ends[state] or self.ends[shorter[state]]
            for character, child in self.next[state].items():
                queue.append(child)
                back = shorter[state]
                while back and character not in self.next[back]:
                    back = shorter[back]
                shorter[child] = self.next[back].get(character, 0)
        return shorter


class StopMatcher:
    """Cuts one choice's text at the first stop sequence that is complete; of those that end at the same character, at the longest.

    However the text is cut into pieces, what `feed` and `finish` return, joined, is the same.
    """

    def __init__(self, sequences: StopSequences) -> None:
        self._sequences = sequences
        self._state = 0
        self._held = ""
        self.is_matched = False
        self.length = 0  # characters handed out

    def feed(self, text: str) -> str:
        """Text that no sequence can take back. Once a sequence has matched, nothing more comes."""
        if self.is_matched:
            return ""
        found, state = self._sequences, self._state
        for position, character in enumerate(text):
            while state and character not in found.next[state]:
                state = found.shorter[state]
            state = found.next[state].get(character, 0)
            if found.ends[state]:
                self.is_matched = True
                text = self._held + text[: position + 1]
                return self._hand_out(text, len(text) - found.ends[state], is_held=False)
        self._state = state
        text = self._held + text
        return self._hand_out(text, len(text) - found.depth[state], is_held=True)

    def finish(self) -> str:
        """The text has ended: what was held back as the beginning of a sequence."""
        return self._hand_out(self._held, len(self._held), is_held=False)

    def _hand_out(self, text: str, count: int, *, is_held: bool) -> str:
        self._held = text[count:] if is_held else ""
        self.length += count
        return text[:count]
