// The panel of sampling parameters.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const FIELDS = [...NUMBERS, "seed", "stop"];
const LARGEST_SEED = 2 ** 31;

const field = (name) => /** @type {HTMLInputElement} */ (byId(`sampling-${name}`));

/** @returns {Record<string, string>} the values of the fields */
export function samplingFields() {
  return Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
}

/** @param {Record<string, string | number>} values of some fields; the others get their defaults */
export function setSamplingFields(values) {
  for (const name of FIELDS) field(name).value = String(values[name] ?? field(name).defaultValue);
}

/**
 * Reads the fields.
 * @returns {import("./generation.js").Sampling} with a random seed if none is given: both answers need the same one
 * @throws {FieldError} a field is not a number
 */
export function sampling() {
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, numberIn(name)]));
  const seed = field("seed").value.trim() === "" ? Math.floor(Math.random() * LARGEST_SEED) : numberIn("seed");
  // One per line; a line feed inside a text is typed as "\n".
  const stop = field("stop")
    .value.split("\n")
    .filter(Boolean)
    .map((text) => text.replaceAll("\\n", "\n"));
  return /** @type {any} */ ({ ...numbers, seed, stop });
}

function numberIn(name) {
  const { value, validity } = field(name);
  if (value.trim() === "" || validity.badInput || !Number.isFinite(Number(value))) {
    throw new FieldError(name, `${labelOf(name)} must be a number`);
  }
  return Number(value);
}

/** An invalid field. */
export class FieldError extends Error {
  /**
   * @param {string} name
   * @param {string} message
   */
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

/**
 * Marks an invalid field.
 * @param {string | null} name the API's name of the field; null removes the mark
 */
export function markField(name) {
  for (const each of FIELDS) field(each).removeAttribute("aria-invalid");
  if (FIELDS.includes(name ?? "")) {
    field(/** @type {string} */ (name)).setAttribute("aria-invalid", "true");
    /** @type {HTMLDetailsElement} */ (byId("sampling")).open = true;
  }
}

function labelOf(name) {
  return document.querySelector(`label[for="sampling-${name}"]`)?.textContent ?? name;
}
