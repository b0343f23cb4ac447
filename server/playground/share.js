// A playground as text for a link, and its draft between visits.

const DRAFT = "logitship.playground";
const PREFIX = "#p=";

/**
 * @typedef {object} Draft what a person has typed
 * @property {"chat" | "raw"} mode
 * @property {string} prompt
 * @property {string} choice which processor: `example:<id>`, `named:<id>` or `own`
 * @property {string} source of the processor, unless the server has it
 * @property {string} params JSON
 * @property {Record<string, string>} sampling the fields' values
 */

/**
 * @param {Draft} draft
 * @returns {Promise<string>} the end of a link, from its `#`
 */
export async function pack(draft) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(draft)));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return PREFIX + btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/**
 * @param {string} hash the end of a link
 * @returns {Promise<Draft | null>} null: it holds none
 * @throws if it is damaged
 */
export async function unpack(hash) {
  if (!hash.startsWith(PREFIX)) return null;
  const binary = atob(hash.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  const draft = JSON.parse(new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes)));
  return checked(draft);
}

/** @returns {Draft | null} what was typed the last time */
export function loadDraft() {
  try {
    return checked(JSON.parse(localStorage.getItem(DRAFT) ?? "null"));
  } catch {
    return null; // forbidden storage, or one that another version wrote
  }
}

/** @param {Draft} draft */
export function saveDraft(draft) {
  try {
    localStorage.setItem(DRAFT, JSON.stringify(draft));
  } catch {
    // The storage is full or forbidden: the page works without it.
  }
}

/** @returns {Draft | null} */
function checked(draft) {
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
