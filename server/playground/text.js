// Display of tokens and numbers.

const INVISIBLE = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };
const SPOKEN = { " ": "space", "\n": "line feed", "\t": "tab", "\r": "carriage return", "\u00a0": "no-break space" };

const UNSEEN = /^[\s\0-\x1f]*$/;

/**
 * Writes a token with a symbol for each invisible character.
 * @param {string} text
 */
export function visible(text) {
  // Unicode has symbols for the control characters, in their order.
  const picture = (character) => String.fromCharCode(0x2400 + character.charCodeAt(0));
  return text.replace(/[\0-\x20\xa0]/g, (character) => INVISIBLE[character] ?? picture(character)) || "∅";
}

/**
 * Returns a symbol to show before a token that is invisible or contains a line feed.
 * @param {string} text
 * @returns {string | null} null: the token needs none
 */
export function mark(text) {
  if (text.includes("\n")) return INVISIBLE["\n"];
  return text && UNSEEN.test(text) ? visible(text[0]) : null;
}

/**
 * Writes a token for screen readers.
 * @param {string} text
 */
export function spoken(text) {
  if (text === "") return "no text";
  if (!UNSEEN.test(text)) return text.trim();
  return [...text].map((character) => SPOKEN[character] ?? "control character").join(" ");
}

/**
 * @param {number} share from 0 to 1
 */
export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1 %";
  return `${value.toFixed(value < 99.95 && value > 0 ? 1 : 0)} %`;
}

/** @param {number} value */
export function count(value) {
  return value.toLocaleString("en-US");
}
