// The AI SDK with its defaults: `node ai.mjs BASE_URL MODEL` writes what each call gave as one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { ANIMAL, Animal, City, HELLO, REPORT, WEATHER } from "./questions.mjs";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "pocketllm", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const model = provider(name);
const found = {};

found.chat = (await generateText({ model, prompt: HELLO })).text;

const stream = streamText({ model, prompt: HELLO });
found.stream = "";
for await (const text of stream.textStream) found.stream += text;
found.usage = (await stream.usage).outputTokens;

// Steps: a call that is asked for, then an answer to its result.
const round = (run) => {
  const cities = [];
  const tools = { get_weather: tool({ description: "The weather in a city.", inputSchema: City, execute: async ({ city }) => (cities.push(city), REPORT) }) };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
  return { cities, result: run({ model, prompt: WEATHER, tools, prepareStep, stopWhen: stepCountIs(2) }) };
};
const whole = round(generateText);
found.call = { text: (await whole.result).text, cities: whole.cities };
const streamed = round(streamText);
await streamed.result.consumeStream();
found.streamed_call = { text: await streamed.result.text, cities: streamed.cities };

found.animal = (await generateObject({ model, schema: Animal, prompt: ANIMAL })).object;
found.streamed_animal = await (async () => {
  const { partialObjectStream, object } = streamObject({ model, schema: Animal, prompt: ANIMAL });
  for await (const part of partialObjectStream) void part;
  return object;
})();
found.output = (await generateText({ model, prompt: ANIMAL, output: Output.object({ schema: Animal }) })).output;
console.log(JSON.stringify(found));
