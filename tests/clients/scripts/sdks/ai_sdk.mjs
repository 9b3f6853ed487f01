// Vercel's AI SDK, by its provider for servers that are compatible with OpenAI's.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, KEY, MODEL, tried } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "trinamo",
  baseURL: BASE,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const STEADY = {
  model: provider(MODEL),
  prompt: "Say hello.",
  temperature: 0,
  maxOutputTokens: 16,
  maxRetries: 0,
};
const schema = z.object({ name: z.string().max(20), is_adult: z.boolean() });
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

await tried("generateText", async () => {
  const found = await generateText(STEADY);
  assert(found.text);
  assert(found.usage.outputTokens > 0);
});
await tried("streamText", async () => {
  const found = streamText(STEADY);
  let text = "";
  for await (const each of found.textStream) text += each;
  assert(text);
  assert((await found.usage).outputTokens > 0);
});
await tried("Output.object", async () => {
  const asked = { ...STEADY, maxOutputTokens: 80, output: Output.object({ schema }) };
  assert.equal(typeof (await generateText(asked)).output.is_adult, "boolean");
});
await tried("Output.object, streamed", async () => {
  const asked = { ...STEADY, maxOutputTokens: 80, output: Output.object({ schema }) };
  let last;
  for await (const each of streamText(asked).partialOutputStream) last = each;
  assert.equal(typeof last.is_adult, "boolean");
});
await tried("a tool, and its result goes back", async () => {
  const found = await generateText({
    ...STEADY,
    maxOutputTokens: 64,
    tools: { get_weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    stopWhen: stepCountIs(2),
  });
  assert.match(found.steps[0].toolResults[0].output, /sunny/);
  assert.equal(found.steps.length, 2);
});
await tried("completion", async () => {
  const model = provider.completionModel(MODEL);
  assert((await generateText({ ...STEADY, model })).text);
});
await tried("an error is an APICallError with a status", async () => {
  const error = await generateText({ ...STEADY, model: provider("none") }).catch((each) => each);
  assert.equal(error.statusCode, 404);
  assert.equal(error.isRetryable, false);
});
