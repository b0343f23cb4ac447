// The sampling parameters.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const FIELDS = [...NUMBERS, "seed", "stop"];
const LARGEST_SEED = 2 ** 31;

const field = (name) => /** @type {HTMLInputElement} */ (byId(`sampling-${name}`));

/** @returns {Record<string, string>} the fields as they are */
export function samplingFields() {
  return Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
}

/** @param {Record<string, string | number>} values of some fields; the others get their defaults */
export function setSamplingFields(values) {
  for (const name of FIELDS) field(name).value = String(values[name] ?? field(name).defaultValue);
}

/**
 * What the fields mean.
 * @returns {import("./generation.js").Sampling} an empty seed becomes a random one: both answers must have the same
 * @throws {FieldError} names the field that has no number
 */
export function sampling() {
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, numberIn(name)]));
  const seed = field("seed").value.trim() === "" ? Math.floor(Math.random() * LARGEST_SEED) : numberIn("seed");
  // One a line, as typed; "\n" in it is a line feed, which could not be typed otherwise.
  const stop = field("stop")
    .value.split("\n")
    .filter(Boolean)
    .map((text) => text.replaceAll("\\n", "\n"));
  return /** @type {any} */ ({ ...numbers, seed, stop });
}

function numberIn(name) {
  const { value, validity } = field(name);
  if (value.trim() === "" || validity.badInput || !Number.isFinite(Number(value))) {
    throw new FieldError(name, `${labelOf(name)} is not a number`);
  }
  return Number(value);
}

/** A field that does not hold what it should. */
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
 * Marks the field that an error is about.
 * @param {string | null} name as the API calls it; null takes the mark back
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
