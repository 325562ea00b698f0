#include "bindings.h"
#include "constraint.h"
#include "engine/engine.h"
#include "errors.h"
#include "value_type.h"

namespace pocket::python {

void bind_sampling(py::module_& module) {
    ValueType<TokenLogprobs>(module, "TokenLogprobs", "Natural log probabilities at one token, over the whole vocabulary.", false)
        .field("logprob", &TokenLogprobs::logprob, "of the token that was drawn, or that the prompt has")
        .field("top", &TokenLogprobs::top, "(id, logprob) of the most likely ids, most likely first");

    ValueType<LogitTerms>(module, "LogitTerms", "What a request changes in the logits before its tokens are drawn.", true)
        .field("repetition_penalty", &LogitTerms::repetition_penalty, "divides logits above 0 of ids of prompt and answer, multiplies others; 1 is off")
        .field("frequency_penalty", &LogitTerms::frequency_penalty, "taken from an id's logit for each time that it is in the answer")
        .field("presence_penalty", &LogitTerms::presence_penalty, "taken from the logit of each id of the answer")
        .field("logit_bias", &LogitTerms::logit_bias, "(id, number added to its logit), each id once")
        .field("min_p", &LogitTerms::min_p, "least probability that is drawn, as a part of the likeliest id's; 0 is off")
        .field("min_tokens", &LogitTerms::min_tokens, "no id that ends the answer is drawn before it has so many")
        .field("allowed_token_ids", &LogitTerms::allowed_token_ids, "no others are drawn; None allows all")
        .field("bad_words", &LogitTerms::bad_words, "ids of each; the last is not drawn after the others");

    using Params = QwenBatchSamplingParams;
    ValueType<Params>(module, "QwenBatchSamplingParams", "How one request is answered. Every field has a default and may be given by keyword.", true)
        .field("max_new_tokens", &Params::max_new_tokens, "at least 1, or 0 with prompt_logprobs")
        .field("temperature", &Params::temperature, "0 is greedy; then top_p, top_k and seed are not read")
        .field("top_p", &Params::top_p, "in (0, 1]; 1 is off")
        .field("top_k", &Params::top_k, "0 is off")
        .field("seed", &Params::seed, "of the request's random stream; None takes one from the engine's seed")
        .field("stop_token_ids", &Params::stop_token_ids, "ids that end the answer; None is the checkpoint's EOS ids")
        .field("logprobs", &Params::logprobs, "alternatives to rank at each token, 0 to 20, or None")
        .field("prompt_logprobs", &Params::prompt_logprobs, "alternatives to rank at each token of the prompt but the first, 0 to 20, or None")
        .property(
            "constraint",
            [](const Params& self) -> py::object {
                const auto* constraint = dynamic_cast<const PythonConstraint*>(self.constraint.get());
                return constraint == nullptr ? py::object(py::none()) : constraint->object();
            },
            [](Params& self, const py::object& value) {
                self.constraint = value.is_none() ? nullptr : std::make_shared<PythonConstraint>(value);
            },
            "an object with fill(mask), accept(token_id) and is_complete, for one request; or None")
        .property(
            "terms", [](const Params& self) { return self.terms; }, [](Params& self, const std::optional<LogitTerms>& value) { self.terms = value; },
            "a LogitTerms that changes the logits, or None")
        .field("priority", &Params::priority, "requests with a lower number are started first and preempted last");

    using Usage = QwenBatchUsage;
    ValueType<Usage>(module, "QwenBatchUsage", "Tokens of one request.", false)
        .field("prompt_tokens", &Usage::prompt_tokens, "of the prompt")
        .field("completion_tokens", &Usage::completion_tokens, "generated, the id that ended the answer included")
        .field("cached_tokens", &Usage::cached_tokens, "of the prompt, found in the prefix cache");

    using Result = QwenBatchResult;
    ValueType<Result>(module, "QwenBatchResult", "One finished request.", false)
        .field("request_id", &Result::request_id, "as submit_request returned it")
        .field("token_ids", &Result::token_ids, "of the answer; an id that ended it is left out")
        .computed("finish_reason", [](const Result& self) { return name(self.finish_reason); }, "\"stop\", \"length\", \"cancelled\" or \"error\"")
        .field("usage", &Result::usage, "tokens of the request")
        .field("logprobs", &Result::logprobs, "one TokenLogprobs a token where they were asked for")
        .field("prompt_logprobs", &Result::prompt_logprobs, "one TokenLogprobs a token of the prompt but the first, where they were asked for")
        .computed("error", [](const Result& self) { return to_python(self.error); }, "the exception behind finish_reason \"error\", or None");

    ValueType<StepOutput>(module, "QwenBatchStep", "What one step gave one request.", false)
        .field("request_id", &StepOutput::request_id, "as submit_request returned it")
        .field("token_ids", &StepOutput::token_ids, "new ids; an id that ends the answer is left out")
        .field("num_generated", &StepOutput::num_generated, "tokens generated so far, the id that ended the answer included")
        .computed(
            "finish_reason", [](const StepOutput& self) { return self.finish_reason ? name(*self.finish_reason) : nullptr; },
            "set on the last step: \"stop\", \"length\", \"cancelled\" or \"error\"")
        .field("cached_tokens", &StepOutput::cached_tokens, "prompt tokens found in the prefix cache")
        .computed("error", [](const StepOutput& self) { return to_python(self.error); }, "the exception behind finish_reason \"error\", or None")
        .field("logprobs", &StepOutput::logprobs, "one TokenLogprobs a token where they were asked for")
        .field("prompt_logprobs", &StepOutput::prompt_logprobs, "on the first step, one a token of the prompt but the first, where they were asked for");

    using Stats = EngineStats;
    ValueType<Stats>(module, "EngineStats", "Gauges, and running totals since the scheduler began.", false)
        .field("running", &Stats::running, "requests that run")
        .field("waiting", &Stats::waiting, "requests that wait")
        .field("kv_blocks_total", &Stats::kv_blocks_total, "KV blocks")
        .field("kv_blocks_used", &Stats::kv_blocks_used, "of them, held by running requests")
        .field("prompt_tokens", &Stats::prompt_tokens, "of all prompts")
        .field("generated_tokens", &Stats::generated_tokens, "of all answers")
        .field("cached_tokens", &Stats::cached_tokens, "of all prompts, found in the prefix cache")
        .field("preemptions", &Stats::preemptions, "requests that gave their blocks up and were computed again");
}

}  // namespace pocket::python
