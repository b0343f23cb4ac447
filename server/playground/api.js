// Client of the server's public routes.

import { readEvents } from "./sse.js";

const KEY = "logitship.api-key";
/** The API key, where the browser forbids storage. */
let kept = "";

/** A failed request, with the server's message if there is one. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, type?: string, param?: string | null, traceback?: string, name?: string}} [details]
   *   `status` is 0 if there was no response
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

/** @returns {string} the API key, which is stored in this tab only */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return kept;
  }
}

/** @param {string} key the API key; "" removes it */
export function setApiKey(key) {
  kept = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // kept until the page is closed
  }
}

/**
 * Gets the JSON response of a route.
 * @param {string} path without a leading slash, so that the page also works below a prefix
 * @returns {Promise<any>}
 */
export async function get(path) {
  return parsed(await send(path, {}));
}

/**
 * Gets the text of a file.
 * @param {string} path
 * @returns {Promise<string>}
 */
export async function getText(path) {
  return (await send(path, {})).text();
}

/**
 * Posts a JSON body, and gets the JSON response.
 * @param {string} path
 * @param {object} body
 * @returns {Promise<any>}
 */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return parsed(await send(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

/**
 * Yields the events of a streamed response.
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
    throw new ApiError(`The response was interrupted: ${error.message}.`, { type: "network" });
  }
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function send(path, options) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${bytesOf(key)}` } : {}) };
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

/** @param {Response} answer */
async function parsed(answer) {
  try {
    return await answer.json();
  } catch (error) {
    throw new ApiError(`The response is not JSON: ${error.message}.`, { type: "network" }); // a proxy's page
  }
}

/** Returns the UTF-8 bytes of a text as characters, as `fetch` takes the value of a header. */
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** Returns the error object in a response; undefined if there is none, as in a proxy's error page. */
function errorIn(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? { message: error } : error;
  } catch {
    return undefined;
  }
}

function asError(error, status) {
  return new ApiError(String(error.message), { ...error, status, traceback: error.traceback ?? "" });
}

function unreachable(error) {
  return new ApiError(`No response from the server: ${error.message}. Check that it is running.`, { type: "network" });
}
