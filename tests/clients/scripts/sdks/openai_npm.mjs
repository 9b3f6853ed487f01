// OpenAI's SDK for JavaScript.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, KEY, MODEL, SHORT, mustThrow, tried } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const chat = client.chat.completions;
const STEADY = { model: MODEL, messages: SHORT, temperature: 0, max_tokens: 12 };
const Person = z.object({ name: z.string().max(20), is_adult: z.boolean() });

await tried("models", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert(ids.includes(MODEL));
});
await tried("chat", async () => {
  const found = await chat.create(STEADY);
  assert(found.choices[0].message.content);
  assert(found.usage.total_tokens > 0);
});
await tried("chat, streamed", async () => {
  let text = "";
  for await (const each of await chat.create({ ...STEADY, stream: true }))
    text += each.choices[0]?.delta?.content ?? "";
  assert(text);
});
await tried("parse by zod", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const found = await chat.parse({ ...STEADY, max_tokens: 80, response_format });
  assert.equal(typeof found.choices[0].message.parsed.is_adult, "boolean");
});
await tried("a forced tool", async () => {
  const parameters = {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 } },
    required: ["city"],
    additionalProperties: false,
  };
  const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];
  const found = await chat.create({ ...STEADY, max_tokens: 64, tools, tool_choice: "required" });
  assert.deepEqual(
    Object.keys(JSON.parse(found.choices[0].message.tool_calls[0].function.arguments)),
    ["city"],
  );
});
await tried("a stream that is left", async () => {
  const leaving = new AbortController();
  const asked = { ...STEADY, max_tokens: 400, stream: true };
  for await (const each of await chat.create(asked, { signal: leaving.signal })) {
    assert(each);
    leaving.abort();
  }
  assert((await chat.create(STEADY)).choices.length);
});
await tried("completion of a list", async () => {
  const prompt = ["Paris is", "One, two,"];
  const found = await client.completions.create({ model: MODEL, prompt, max_tokens: 5 });
  assert.deepEqual(found.choices.map((each) => each.index), [0, 1]);
});
await tried("responses", async () => {
  const found = await client.responses.create({
    model: MODEL,
    input: "Say hello.",
    max_output_tokens: 16,
  });
  assert(found.output_text);
});
await tried("responses, streamed", async () => {
  const asked = { model: MODEL, input: "Say hello.", max_output_tokens: 16 };
  const final = await client.responses.stream(asked).finalResponse();
  assert(final.output_text);
});
await tried("a prompt that is too long", async () => {
  const messages = [{ role: "user", content: "word ".repeat(6000) }];
  const error = await mustThrow(OpenAI.BadRequestError, chat.create({ model: MODEL, messages }));
  assert.equal(error.code, "context_length_exceeded");
});
await tried("a model that is not there", async () => {
  await mustThrow(OpenAI.NotFoundError, chat.create({ ...STEADY, model: "none" }));
});
