// One of the two answers: its tokens as they arrive, and its statistics and receipts at the end.

import { ApiError } from "./api.js";
import { byId, h } from "./dom.js";
import { generate } from "./generation.js";
import { TokenView } from "./tokens.js";

/** @typedef {import("./generation.js").Token} Token */

const ENDED = { stop: "finished", length: "reached max tokens", abort: "aborted" };

/** A column of the page: `#<id>`, with its parts. */
export class AnswerColumn {
  /**
   * @param {string} id
   * @param {(index: number) => void} onChoose called with the index of the chosen token
   */
  constructor(id, onChoose) {
    this.root = byId(id);
    this.title = byId(`${id}-title`);
    this.status = byId(`${id}-status`);
    this.receipts = byId(`${id}-receipts`);
    this.problem = byId(`${id}-error`);
    this.view = new TokenView(byId(`${id}-tokens`), onChoose);
  }

  /** @returns {Token[]} */
  get tokens() {
    return this.view.tokens;
  }

  /** Removes the answer. */
  clear() {
    this.view.clear();
    this.status.textContent = "";
    this.receipts.replaceChildren();
    this.problem.replaceChildren();
    this.root.removeAttribute("data-state");
  }

  /**
   * Runs a request and shows its answer as it arrives.
   * @param {"chat" | "raw"} mode
   * @param {object} body
   * @param {AbortSignal} signal
   * @param {() => void} onTokens called after new tokens are shown
   * @returns {Promise<unknown>} null, or the error that ended the request, which is also shown
   */
  async run(mode, body, signal, onTokens) {
    const clock = new Clock();
    this.#state("running", "waiting for the first token …");
    try {
      const ending = await generate(mode, body, signal, (tokens) => {
        clock.count(tokens.length);
        this.view.append(tokens);
        this.status.textContent = clock.toString();
        onTokens();
      });
      this.#state("done", `${clock} · ${ENDED[ending.reason] ?? ending.reason}`);
      this.receipts.replaceChildren(...ending.receipts.map(receipt));
      return null;
    } catch (error) {
      if (signal.aborted) {
        this.#state("stopped", `${clock} · stopped`);
        return null;
      }
      this.#state("failed", `${clock} · failed`);
      this.problem.replaceChildren(error instanceof ApiError ? error.message.split("\n")[0] : String(error));
      return error;
    }
  }

  #state(state, status) {
    this.root.dataset.state = state;
    this.status.textContent = status;
  }
}

/** @param {import("./generation.js").Ending["receipts"][number]} receipt */
function receipt({ name, digest, steps, milliseconds, forced_steps, printed }) {
  const each = steps ? ` (${(milliseconds / steps).toFixed(2)} ms each)` : "";
  const forced = forced_steps ? `, ${forced_steps} without a forward pass` : "";
  return h(
    "li",
    {},
    h("strong", {}, name),
    ` ${steps} ${steps === 1 ? "step" : "steps"}, ${milliseconds.toFixed(1)} ms${each}${forced} `,
    h("code", { title: digest }, `${digest.slice(0, 19)}…`),
    ...(printed ? [h("pre", { "aria-label": `Printed by ${name}` }, printed)] : []),
  );
}

/** Counts tokens and their rate, starting at the first token: before it, the prompt is processed. */
class Clock {
  #tokens = 0;
  #atFirst = 0;
  #first = 0;
  #last = 0;

  count(tokens) {
    this.#last = performance.now();
    if (this.#tokens === 0) [this.#first, this.#atFirst] = [this.#last, tokens];
    this.#tokens += tokens;
  }

  toString() {
    const seconds = (this.#last - this.#first) / 1000;
    const speed = seconds > 0 ? ` · ${((this.#tokens - this.#atFirst) / seconds).toFixed(0)} tokens/s` : "";
    return `${this.#tokens} ${this.#tokens === 1 ? "token" : "tokens"}${speed}`;
  }
}
