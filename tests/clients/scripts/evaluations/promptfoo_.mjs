// promptfoo: its command, with the providers of OpenAI for chat and for completions.

import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { BASE, KEY, MODEL, tried } from "./checks.mjs";

const settings = { apiBaseUrl: BASE, apiKey: KEY, temperature: 0, max_tokens: 24 };
const options = { stdio: "pipe", encoding: "utf-8", env: {
  ...process.env,
  PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: ".",
} };

for (const kind of ["chat", "completion"]) {
  await tried(`eval by the provider of ${kind}`, () => {
    writeFileSync("config.json", JSON.stringify({
      prompts: ["Say {{word}}."],
      providers: [{ id: `openai:${kind}:${MODEL}`, config: settings }],
      tests: ["hello", "yes"].map((word) => ({
        vars: { word }, assert: [{ type: "javascript", value: "output.length > 0" }],
      })),
    }));
    const main = "node_modules/promptfoo/dist/src/entrypoint.js";
    execFileSync(process.execPath,
      [main, "eval", "--config", "config.json", "--output", "told.json", "--no-cache"], options);
    const { results } = JSON.parse(readFileSync("told.json", "utf-8"));
    if (results.stats.successes !== 2) throw new Error(JSON.stringify(results).slice(0, 500));
  });
}
