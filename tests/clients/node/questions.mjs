// What the npm clients are asked, as questions.py has it for the others.
import { z } from "zod";

export const HELLO = "Hello! Who are you?";
export const WEATHER = "What is the weather in Paris? Use the tool.";
export const ANIMAL = "Tell me about a dog: which kind of animal is it, and how many legs has it?";
export const REPORT = "Sunny, 21 degrees.";

export const City = z.object({ city: z.enum(["Paris", "Rome", "Oslo"]) });
export const Animal = z.object({ kind: z.enum(["mammal", "bird", "fish"]), legs: z.int().min(0).max(8), is_tame: z.boolean() });

export const WEATHER_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string", enum: ["Paris", "Rome", "Oslo"] } }, required: ["city"] },
  },
};

export const user = (content) => [{ role: "user", content }];
