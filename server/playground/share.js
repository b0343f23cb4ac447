// Drafts: the page's inputs, encoded in a link or stored between visits.

const DRAFT = "logitship.playground";
const PREFIX = "#p=";

/**
 * @typedef {object} Draft the page's inputs
 * @property {"chat" | "raw"} mode
 * @property {string} prompt
 * @property {string} choice the chosen processor: `example:<id>`, `named:<id>`, `own`, or `kept:<number>`, see drafts.js
 * @property {string} source of the processor, unless it is one of the server's
 * @property {string} params JSON
 * @property {Record<string, string>} sampling the fields' values
 */

/**
 * @param {Draft} draft
 * @returns {Promise<string>} the fragment of a link, with its `#`
 */
export async function pack(draft) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(draft)));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return PREFIX + btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/**
 * @param {string} hash the fragment of a link
 * @returns {Promise<Draft | null>} null: there is no draft in it
 * @throws if the draft is damaged
 */
export async function unpack(hash) {
  if (!hash.startsWith(PREFIX)) return null;
  const binary = atob(hash.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  const draft = JSON.parse(new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes)));
  return checked(draft);
}

/** @returns {Draft | null} the inputs of the last visit */
export function loadDraft() {
  try {
    return checked(JSON.parse(localStorage.getItem(DRAFT) ?? "null"));
  } catch {
    return null; // storage is forbidden, or was written by another version
  }
}

/** @param {Draft} draft */
export function saveDraft(draft) {
  try {
    localStorage.setItem(DRAFT, JSON.stringify(draft));
  } catch {
    // Storage is full or forbidden: the page works without it.
  }
}

/** @returns {Draft | null} the draft @throws if it is none */
export function checked(draft) {
  if (draft === null) return null;
  const texts = [draft.prompt, draft.choice, draft.source, draft.params, ...Object.values(draft.sampling)];
  if (!["chat", "raw"].includes(draft.mode) || texts.some((text) => typeof text !== "string")) {
    throw new TypeError("not a draft");
  }
  return draft;
}

async function through(transform, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer());
}
