"""What a request changes in the logits before its tokens are drawn: one definition, which both planes implement and the tests compute in float64.

At each token, with l the logits of the row as the model gives them, in this order:

1. repetition_penalty r (Keskar et al., CTRL, 2019, as vLLM applies it): for each id in the prompt or the answer so far, l = l / r where l > 0, else l * r.
2. frequency_penalty f and presence_penalty p (OpenAI's API reference): for each id that the answer so far has c > 0 times, l = l - f * c - p.
3. logit_bias (OpenAI's API reference): l = l + the id's bias.
4. What can't be drawn: ids that end the row, before it has min_tokens tokens; ids outside allowed_token_ids; the last id of a bad word whose other ids are
   the end of the answer so far; what the row's constraint forbids.
5. Temperature: l = l / temperature; 0 takes the largest l, and nothing below is read.
6. min_p (Nguyen et al., 2024, before top_k and top_p as in vLLM): only ids whose probability is at least min_p times that of the likeliest one.
7. top_k, then top_p over what top_k left.

Log probabilities are those of the model: of the logits before step 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitTerms:
    """The terms of one row, every default resolved. A row that has none of them has no LogitTerms, and pays nothing.

    Args:
        repetition_penalty: above 0, at most 2; 1 is off.
        frequency_penalty, presence_penalty: from -2 to 2; 0 is off.
        logit_bias: (id, bias) with each id once, biases from -100 to 100.
        min_p: from 0, which is off, to 1.
        min_tokens: no id that ends the row is drawn before it has so many tokens.
        allowed_token_ids: at least one id, ascending, each once; None allows all.
        bad_words: each the ids, at least one, of what the answer must not contain.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def named_ids(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The ids in each field that has some."""
        words = tuple(token_id for word in self.bad_words for token_id in word)
        return ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias)), ("allowed_token_ids", self.allowed_token_ids or ()), ("bad_words", words)


NO_TERMS = LogitTerms()
