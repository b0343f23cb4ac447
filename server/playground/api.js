// The server's public routes, as every other client sees them.

import { readEvents } from "./sse.js";

const KEY = "logitship.api-key";

/** What went wrong, in the server's words where it has any. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, type?: string, param?: string | null, traceback?: string, name?: string}} [details]
   *   `status` is 0 where no answer came
   */
  constructor(message, { status = 0, type = "", param = null, traceback = "", name = "" } = {}) {
    super(message);
    this.status = status;
    this.type = type;
    this.param = param;
    this.traceback = traceback;
    this.processor = name;
  }
}

/** @returns {string} the API key, which this tab alone keeps */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** @param {string} key the API key; "" forgets it */
export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * The JSON answer of a route.
 * @param {string} path without a slash at its front, so that the page also works below a prefix
 * @returns {Promise<any>}
 */
export async function get(path) {
  return (await send(path, {})).json();
}

/**
 * The events of a streamed answer.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* stream(path, body, signal) {
  const answer = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const event of readEvents(answer.body)) {
      if (event.error) throw asError(event.error, answer.status);
      yield event;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(`The answer broke off: ${error.message}.`, { type: "network" });
  }
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function send(path, options) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw options.signal?.aborted ? error : unreachable(error);
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  throw asError(errorIn(text) ?? { message: text.slice(0, 500) || answer.statusText }, answer.status);
}

function errorIn(text) {
  try {
    return JSON.parse(text).error;
  } catch {
    return undefined; // a proxy's page, perhaps
  }
}

function asError(error, status) {
  return new ApiError(String(error.message), { ...error, status, traceback: error.traceback ?? "" });
}

function unreachable(error) {
  return new ApiError(`No answer came from the server: ${error.message}. Is it still running?`, { type: "network" });
}
