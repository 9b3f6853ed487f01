// What a program's script says of itself, as `checks.py` does for Python.

import { performance } from "node:perf_hooks";

export const SERVER = process.env.CLIENTS_SERVER;
export const BASE = `${SERVER}/v1`;
export const MODEL = process.env.CLIENTS_MODEL;
export const KEY = "any";
export const SHORT = [{ role: "user", content: "Say hello." }];

/** Try something; what it throws is told, and the next thing is tried. */
export async function tried(what, attempt) {
  const told = { tried: what };
  const began = performance.now();
  try {
    await attempt();
  } catch (error) {
    told.failed = `${error?.name}: ${error?.message}`.replace(/\s+/g, " ").slice(0, 600);
  }
  told.took_s = Math.round(performance.now() - began) / 1000;
  console.log(JSON.stringify(told));
}

/** The error that the promise has to be rejected with. */
export async function mustThrow(kind, promise) {
  const found = await promise.then(
    (answer) => new Error(`no ${kind.name} but ${JSON.stringify(answer).slice(0, 300)}`),
    (error) => error,
  );
  if (!(found instanceof kind)) throw found;
  return found;
}
