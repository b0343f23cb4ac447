// An answer as a list of tokens, to be chosen with the mouse, or with the arrow keys and Enter.

import { h } from "./dom.js";
import { effectOf } from "./effects.js";
import { mark, spoken } from "./text.js";

/** @typedef {import("./generation.js").Token} Token */

const LABELS = { forced: "forced", forbidden: "first choice forbidden", changed: "first choice changed", none: "" };

/** A list of tokens, one of which can be chosen. It has a single tab stop, which the arrow keys move. */
export class TokenView {
  /**
   * @param {HTMLElement} host a `listbox`
   * @param {(index: number) => void} onChoose
   */
  constructor(host, onChoose) {
    this.host = host;
    /** @type {Token[]} */
    this.tokens = [];
    this.focused = 0;
    this.onChoose = onChoose;
    host.addEventListener("click", (event) => {
      const token = /** @type {HTMLElement} */ (event.target).closest("[role=option]");
      if (token) this.choose([...host.children].indexOf(token));
    });
    host.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Removes all tokens. */
  clear() {
    this.tokens = [];
    this.focused = 0;
    this.host.replaceChildren();
  }

  /** @param {Token[]} tokens new tokens */
  append(tokens) {
    for (const token of tokens) {
      this.tokens.push(token);
      this.host.append(element(token, this.tokens.length));
    }
    this.host.children[this.focused]?.setAttribute("tabindex", "0");
  }

  /** Chooses a token, and calls `onChoose`. @param {number} index */
  choose(index) {
    this.#focusable(index);
    this.unchoose();
    this.host.children[index].setAttribute("aria-selected", "true");
    this.onChoose(index);
  }

  /** Clears the choice. */
  unchoose() {
    this.host.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
  }

  /** @param {number} index of the first token that differs from the other answer */
  markDifference(index) {
    const token = this.host.children[index];
    if (!token || token.classList.contains("differs")) return;
    token.classList.add("differs");
    token.setAttribute("aria-label", `${token.getAttribute("aria-label")}, first difference`);
  }

  #focusable(index) {
    this.host.children[this.focused]?.setAttribute("tabindex", "-1");
    this.focused = index;
    this.host.children[index].setAttribute("tabindex", "0");
  }

  #key(event) {
    const last = this.tokens.length - 1;
    if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowRight: Math.min(this.focused + 1, last),
      ArrowDown: Math.min(this.focused + 1, last),
      ArrowLeft: Math.max(this.focused - 1, 0),
      ArrowUp: Math.max(this.focused - 1, 0),
      Home: 0,
      End: last,
    };
    if (event.key in moves) {
      this.#focusable(moves[event.key]);
      /** @type {HTMLElement} */ (this.host.children[this.focused]).focus();
    } else if (event.key === "Enter" || event.key === " ") {
      this.choose(this.focused);
    } else return;
    event.preventDefault();
  }
}

/**
 * @param {Token} token
 * @param {number} number from 1
 */
function element(token, number) {
  const effect = effectOf(token.trace);
  const kind = effect?.kind ?? "none";
  const label = [spoken(token.text || token.trace.text), `token ${number}`, LABELS[kind]].filter(Boolean).join(", ");
  // A token that adds no text, such as the EOS token, is shown by its name.
  const text = token.text || token.trace.text || "∅";
  // The leading space of a word is outside the marked part: it may be at the end of a line.
  const [, space, rest] = /^( ?)(.*)$/s.exec(text);
  const ink = h("span", { class: "ink", "data-mark": mark(token.text) }, rest || space);
  if (effect) ink.style.setProperty("--shift", effect.shift.toFixed(3));
  return h(
    "span",
    {
      class: `token ${kind}${token.text ? "" : " unseen"}`,
      role: "option",
      tabindex: "-1",
      "aria-selected": "false",
      "aria-label": label,
    },
    rest ? space : "",
    ink,
  );
}
