// Vercel's AI SDK with the provider for OpenAI's responses, which sends items by name at the second step.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [url, key] = process.argv.slice(3);
const add = tool({
  description: "adds",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const model = createOpenAI({ baseURL: url, apiKey: key })("policy");
console.log((await generateText({ model, tools: { add }, prompt: "add 1 and 2", stopWhen: stepCountIs(5) })).text);
