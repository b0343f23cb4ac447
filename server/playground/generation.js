// A streamed request to the server, with its answer split into tokens.

import { stream } from "./api.js";

/** Number of most likely tokens per stage in a trace. */
const TOP = 20;

/**
 * @typedef {object} Stage
 * @property {"model" | "request" | "processor" | "sampling"} stage
 * @property {string} [name] name of the processor
 * @property {boolean} [again] the second run of a mask
 * @property {(number | null)[]} logprobs one per candidate; null: forbidden
 * @property {number} num_allowed
 *
 * @typedef {object} Trace
 * @property {number} token_id
 * @property {string} text
 * @property {{token_id: number, text: string}[]} candidates
 * @property {Stage[]} stages
 *
 * @typedef {object} Token
 * @property {string} text the text it adds to the answer
 * @property {Trace} trace
 *
 * @typedef {object} Ending
 * @property {string} reason
 * @property {{digest: string, name: string, steps: number, milliseconds: number, forced_steps: number, printed?: string}[]} receipts
 *
 * @typedef {object} Sampling
 * @property {number} temperature
 * @property {number} top_p
 * @property {number} top_k
 * @property {number} min_p
 * @property {number} max_tokens
 * @property {number} seed
 * @property {string[]} stop
 */

/**
 * Builds the body of a request.
 * @param {"chat" | "raw"} mode
 * @param {string} prompt
 * @param {Sampling} sampling
 * @param {{processor: object, params: object} | null} attached the processor and its parameters
 * @returns {object}
 */
export function bodyOf(mode, prompt, sampling, attached) {
  const { temperature, max_tokens, seed, top_p, top_k, min_p, stop } = sampling;
  return {
    ...(mode === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature,
    max_tokens,
    seed,
    // Filters that are off are omitted. Invalid values are sent, so that the server names the field.
    ...(top_p === 1 ? {} : { top_p }),
    ...(top_k === -1 || top_k === 0 ? {} : { top_k }),
    ...(min_p === 0 ? {} : { min_p }),
    ...(stop.length ? { stop } : {}),
    ...(attached ? { custom_logit_processor: attached.processor, custom_params: attached.params } : {}),
    stream: true,
    trace: { top: TOP },
  };
}

/**
 * Runs a request.
 * @param {"chat" | "raw"} mode
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(tokens: Token[]) => void} onTokens called with new tokens
 * @returns {Promise<Ending>}
 */
export async function generate(mode, body, signal, onTokens) {
  const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
  /** @type {Ending} */
  const ending = { reason: "", receipts: [] };
  for await (const event of stream(path, body, signal)) {
    for (const choice of event.choices) {
      const text = mode === "chat" ? (choice.delta.content ?? "") : choice.text;
      if (choice.trace?.length) onTokens(withTexts(choice.trace, text));
      if (choice.finish_reason) {
        ending.reason = choice.finish_reason;
        ending.receipts = choice.receipts ?? [];
      }
    }
  }
  return ending;
}

/**
 * Splits the text of an event among its tokens. A token may add none: a part of a character, or the EOS token.
 * @param {Trace[]} traces
 * @param {string} text
 * @returns {Token[]}
 */
function withTexts(traces, text) {
  let rest = text;
  return traces.map((trace, index) => {
    const isLast = index === traces.length - 1;
    const own = isLast ? rest : rest.startsWith(trace.text) ? trace.text : "";
    rest = rest.slice(own.length);
    return { text: own, trace };
  });
}
