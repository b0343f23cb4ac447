// The user's drafts in this browser: one for each processor of the list that they edited, and kept ones, which would have
// been overwritten. Each has an entry of its own, so that two tabs do not overwrite each other's.

import { checked } from "./share.js";

const PREFIX = "logitship.playground.draft:";
const KEPT = "kept:";

/** @typedef {import("./share.js").Draft} Draft */

/** Drafts by choice, in the format of a draft: `example:<id>`, `named:<id>`, `own`, or `kept:<number>`. */
export class Drafts {
  /** What this tab has last read or written, by choice. */
  #known = new Map();

  /** @returns {Draft | null} @param {string} choice */
  get(choice) {
    const text = read(PREFIX + choice);
    this.#known.set(choice, text);
    return parsed(text);
  }

  /**
   * Stores a draft under its choice. One that another tab has stored there meanwhile is kept.
   * @param {Draft} draft
   */
  put(draft) {
    const key = PREFIX + draft.choice;
    const before = read(key);
    const text = JSON.stringify(draft);
    if (before !== null && before !== text && before !== this.#known.get(draft.choice)) this.keep(parsed(before));
    write(key, text);
    this.#known.set(draft.choice, text);
  }

  /**
   * Stores a draft as a kept one, unless there is one with the same source.
   * @param {Draft | null} draft
   */
  keep(draft) {
    if (!draft?.source.trim() || this.kept().some(({ source }) => source === draft.source)) return;
    let number = Date.now();
    while (read(`${PREFIX}${KEPT}${number}`) !== null) number++;
    write(`${PREFIX}${KEPT}${number}`, JSON.stringify({ ...draft, choice: `${KEPT}${number}` }));
  }

  /** @returns {Draft[]} the kept drafts, the latest first */
  kept() {
    const number = ({ choice }) => Number(choice.slice(KEPT.length));
    return keys()
      .filter((key) => key.startsWith(PREFIX + KEPT))
      .map((key) => parsed(read(key)))
      .filter((draft) => draft !== null)
      .sort((one, other) => number(other) - number(one));
  }

  /** @param {string} choice */
  remove(choice) {
    this.#known.delete(choice);
    try {
      localStorage.removeItem(PREFIX + choice);
    } catch {
      // Nothing is stored.
    }
  }
}

function parsed(text) {
  try {
    return checked(JSON.parse(text ?? "null"));
  } catch {
    return null; // written by another version
  }
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return []; // storage is forbidden
  }
}

function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function write(key, text) {
  try {
    localStorage.setItem(key, text);
  } catch {
    // Storage is full or forbidden: the page works without it.
  }
}
