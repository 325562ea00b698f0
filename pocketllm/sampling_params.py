"""What a caller may ask of the sampler, request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_TEMPERATURE = 2  # OpenAI's; beyond, hardly more than noise comes
MAX_TOP_K = 2**31 - 1
MAX_REPETITION_PENALTY = 2
MAX_PENALTY = 2
MAX_LOGIT_BIAS = 100  # OpenAI's
MAX_PRIORITY = 2**31 - 1
MAX_BAD_WORDS = 1000
MAX_BAD_WORDS_CHARACTERS = 32_768  # of all of them, which are spelled as ids before the request begins


class _Keywords(type):
    """Looks at the keywords before the class does: what it does not act on is refused in the words of the field table, or harmless and dropped."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # the dataclass that this is the type of
        if unknown := {name: value for name, value in options.items() if name not in known}:
            from pocketllm.protocol.sampling import refuse_keywords  # here, since the table reads this module's limits

            refuse_keywords(unknown)
        return super().__call__(*args, **{name: value for name, value in options.items() if name in known})


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=_Keywords):
    """Sampling of one request. A field left None takes the checkpoint's generation_config.json, else the value in brackets.

    Args:
        max_tokens: most tokens to generate, at least 1 [until EOS or a full context].
        temperature: divides the logits, 0 to 2 [1.0]. 0 is greedy decoding, whatever else is set.
        top_p: nucleus mass in (0, 1] [1.0].
        top_k: size of the candidate set; 0 or -1 is off, 2**31 - 1 the most [off].
        seed: integer in [0, 2**63); the same seed gives the same tokens whatever else is in the batch [random].
        n: number of choices, 1 to 128 [1]. Choice 0 has the seed, the others have seeds mixed from it.
        stop: a string or several; the first occurrence of any of them in the answer ends it and is not part of it [none].
        logprobs: how many alternatives to rank at each token, 0 to 20; 0 gives the token's own log probability alone [no log probabilities].
        prompt_logprobs: the same for each token of the prompt but the first. With it max_tokens may be 0, and then nothing is generated [none].
        best_of: so many candidates, at least n and at most 128, of which the n with the highest mean log probability of a token are the choices [n].
        structured_outputs: the form of the answer, as vLLM has it: {"regex": ...}, {"choice": [...]}, {"grammar": ...} in Lark, {"json": schema} or
            {"json_object": True} [none].
        frequency_penalty: taken from an id's logit for each time that it is in the answer so far, -2 to 2 [0].
        presence_penalty: taken from the logit of each id that is in the answer so far, -2 to 2 [0].
        repetition_penalty: divides the logit of each id that is in prompt or answer where it is above 0, multiplies it elsewhere; above 0, at most 2 [1].
        logit_bias: added to the logits of ids, -100 to 100 each; a mapping from ids [none].
        min_p: only ids are drawn that are at least so likely as this part of the likeliest one, 0 to 1 [0].
        stop_token_ids: ids that end the answer, beside the checkpoint's; the id itself is not part of it [none].
        ignore_eos: the checkpoint's own end-of-sequence ids are ids like others, and don't end the answer [False].
        min_tokens: no id that would end the answer is drawn before it has so many tokens; at most max_tokens [0].
        allowed_token_ids: no other id is drawn; at least one [all].
        bad_words: texts that no answer contains, by their token ids alone and after a space; at most 1000, of 32,768 characters together [none].
        priority: requests with a lower number are started first, and give up their memory last; -2**31 to 2**31 - 1 [0].

    `backends/logit_terms.py` has the formulas and their order.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range, or there is no such field; `param` names the field.
        UnsupportedFeatureError: a sampling field of the HTTP API that nothing acts on, at a value that would matter.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        from pocketllm.protocol.sampling import check_values, resolved_values  # here, since the table reads this module's limits

        check_values(self)
        for name, value in resolved_values(self).items():  # 2.0 is a whole number, and no number of choices is one choice
            object.__setattr__(self, name, value)

    @property
    def num_candidates(self) -> int:
        """How many answers are generated to one prompt."""
        return self.best_of or self.n

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """The strings that end an answer; empty ones, which match nothing, are left out."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(one for one in stop if one)
