// openai-node with its defaults: `node openai.mjs BASE_URL MODEL` writes what each call gave as one JSON object.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { ANIMAL, Animal, HELLO, REPORT, WEATHER, WEATHER_TOOL, user } from "./questions.mjs";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const found = {};

const chat = await client.chat.completions.create({ model, messages: user(HELLO) });
found.chat = chat.choices[0].message.content;

found.stream = "";
for await (const chunk of await client.chat.completions.create({ model, messages: user(HELLO), stream: true })) {
  found.stream += chunk.choices[0].delta.content ?? "";
}

const usage = await client.chat.completions.stream({ model, messages: user(HELLO), stream_options: { include_usage: true } }).totalUsage();
found.usage = usage.completion_tokens;

const first = (await client.chat.completions.create({ model, messages: user(WEATHER), tools: [WEATHER_TOOL], tool_choice: "required" })).choices[0];
const call = first.message.tool_calls[0];
found.call = { finish_reason: first.finish_reason, name: call.function.name, arguments: JSON.parse(call.function.arguments) };
const messages = [...user(WEATHER), first.message, { role: "tool", tool_call_id: call.id, content: REPORT }];
found.answer = (await client.chat.completions.create({ model, messages, tools: [WEATHER_TOOL] })).choices[0].message.content;

const streamed = client.chat.completions.stream({
  model,
  messages: user(WEATHER),
  tools: [WEATHER_TOOL],
  tool_choice: { type: "function", function: { name: WEATHER_TOOL.function.name } },
});
found.streamed_call = JSON.parse((await streamed.finalChatCompletion()).choices[0].message.tool_calls[0].function.arguments);

const parsed = await client.chat.completions.parse({ model, messages: user(ANIMAL), response_format: zodResponseFormat(Animal, "animal") });
found.animal = parsed.choices[0].message.parsed;

found.model = (await client.models.retrieve(model)).id;
try {
  await client.chat.completions.create({ model, messages: user(HELLO), temperature: 99 });
} catch (error) {
  found.error = { is_bad_request: error instanceof OpenAI.BadRequestError, param: error.param, type: error.type };
}
console.log(JSON.stringify(found));
