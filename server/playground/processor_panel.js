// The request's processor: an example, one of the server's processors, or the source in the editor.

import { byId, h } from "./dom.js";
import { createEditor } from "./editor.js";
import { lineOf, processorClass } from "./python_source.js";

/**
 * @typedef {object} Example
 * @property {string} id name of its file
 * @property {string} title
 * @property {string} about
 * @property {"chat" | "raw"} mode
 * @property {string} prompt
 * @property {object} params
 * @property {Record<string, number>} sampling values that differ from the defaults
 *
 * @typedef {object} Named a processor of the server
 * @property {string} id its name in requests
 * @property {"installed" | "registered"} kind by the operator, or by a client with this API key
 * @property {string} description
 * @property {object | null} params_schema
 */

const OWN = "own";

/** The panel. Calls `onChoose` when an example is chosen, `onEdit` when an input changes, and `onRun` to run. */
export class ProcessorPanel {
  /** @param {{onChoose: (example: Example) => void, onEdit: () => void, onRun: () => void}} listeners */
  constructor({ onChoose, onEdit, onRun }) {
    this.onChoose = onChoose;
    this.onEdit = onEdit;
    /** @type {Example[]} */
    this.examples = [];
    /** @type {Named[]} */
    this.named = [];
    this.select = /** @type {HTMLSelectElement} */ (byId("processor"));
    this.params = /** @type {HTMLTextAreaElement} */ (byId("params"));
    this.editor = createEditor(byId("editor"), {
      label: "Source of the processor, in Python",
      describedBy: "Tab indents. Press Escape, then Tab, to leave the editor.",
      onChange: () => this.#edited(),
      onRun,
    });
    this.select.addEventListener("change", () => this.choose(this.select.value));
    this.params.addEventListener("input", () => {
      this.checkParams();
      onEdit();
    });
  }

  /**
   * @param {Example[]} examples
   * @param {Named[]} named
   * @param {boolean} takesCode whether the server runs code sent with requests
   */
  offer(examples, named, takesCode) {
    this.examples = examples;
    this.named = named;
    const ofKind = (kind) =>
      named.filter((each) => each.kind === kind).map(({ id }) => h("option", { value: `named:${id}` }, id));
    const ofExamples = examples.map(({ id, title }) => h("option", { value: `example:${id}` }, title));
    const registered = ofKind("registered");
    this.select.replaceChildren(
      h("optgroup", { label: "Examples", disabled: !takesCode }, ...ofExamples),
      h("option", { value: OWN, disabled: !takesCode }, "Your own code"),
      registered.length ? h("optgroup", { label: "Registered" }, ...registered) : "",
      h("optgroup", { label: "Installed on the server" }, ...ofKind("installed")),
    );
  }

  /** @returns {Promise<void>} @param {string} choice in the format of a draft */
  async choose(choice) {
    const [kind, id] = choice.split(/:(.*)/s);
    if (kind === "example") {
      const example = this.examples.find((each) => each.id === id);
      if (!example) return;
      const source = await (await fetch(`playground/examples/${example.id}.py`)).text();
      this.show({ choice, source, params: formatted(example.params) });
      this.onChoose(example);
    } else if (kind === "named") {
      const named = this.named.find((each) => each.id === id);
      if (!named) return;
      this.show({ choice, source: this.editor.text(), params: formatted(exampleOf(named.params_schema)) });
      this.onEdit();
    } else {
      this.show({ choice, source: this.editor.text(), params: this.params.value });
      this.onEdit();
    }
  }

  /** @param {{choice: string, source: string, params: string}} draft */
  show({ choice, source, params }) {
    if (![...this.select.options].some((option) => option.value === choice)) choice = OWN;
    this.select.value = choice;
    if (source !== this.editor.text()) this.editor.setText(source);
    this.params.value = params;
    this.clearError();
    this.checkParams();
    byId("code").hidden = choice.startsWith("named:");
    byId("about").replaceChildren(...this.#about(choice));
  }

  /** @returns {{choice: string, source: string, params: string}} */
  draft() {
    return { choice: this.select.value, source: this.editor.text(), params: this.params.value };
  }

  /** @returns {string} the name to display */
  name() {
    const { choice, source } = this.draft();
    return choice.startsWith("named:") ? choice.slice("named:".length) : processorClass(source);
  }

  /** @returns {object | null} the processor for a request; null: the source has no class */
  processor() {
    const { choice, source } = this.draft();
    const name = this.name();
    if (choice.startsWith("named:")) return { name };
    return name ? { source, class_name: name } : null;
  }

  /** @returns {object | null} the parameters; null: they are not a JSON object, and the error is shown */
  checkParams() {
    const problem = byId("params-error");
    let value;
    try {
      value = JSON.parse(this.params.value.trim() || "{}");
      problem.textContent = isObject(value) ? "" : 'Enter a JSON object, such as {"letter": "e"}.';
    } catch (error) {
      problem.textContent = `This is not JSON: ${error.message}.`;
    }
    const isValid = problem.textContent === "";
    if (isValid) this.params.removeAttribute("aria-invalid");
    else this.params.setAttribute("aria-invalid", "true");
    return isValid ? value : null;
  }

  /**
   * Shows an error below the editor, and also at its line if there is one.
   * @param {string} message
   * @param {string} traceback
   */
  showError(message, traceback) {
    const line = lineOf(message, traceback);
    const [first] = message.split("\n");
    const last = traceback.trim().split("\n").at(-1) ?? "";
    const short = last || message.trim().split("\n").at(-1) || first;
    if (line && !byId("code").hidden) this.editor.showError(line, short);
    const go = h(
      "button",
      { type: "button", class: "quiet", onclick: () => this.editor.goTo(line) },
      `Go to line ${line}`,
    );
    const rest = traceback || message.split("\n").slice(1).join("\n");
    byId("code-error").replaceChildren(
      h("p", {}, h("strong", {}, line ? `Line ${line}: ` : ""), first),
      rest ? h("pre", { tabindex: "0", "aria-label": "Traceback" }, rest.trim()) : "",
      line ? go : "",
    );
  }

  /** Removes the error. */
  clearError() {
    this.editor.clearError();
    byId("code-error").replaceChildren();
  }

  #edited() {
    if (this.select.value !== OWN) {
      this.select.value = OWN;
      byId("about").replaceChildren(...this.#about(OWN));
    }
    byId("code-error").replaceChildren();
    this.onEdit();
  }

  /** Returns the text below the list. */
  #about(choice) {
    const [kind, id] = choice.split(/:(.*)/s);
    if (kind === "example") return [this.examples.find((each) => each.id === id)?.about ?? ""];
    if (kind === "named") return aboutNamed(this.named.find((each) => each.id === id));
    return ["Your own class. It is stored in this browser until you choose an example."];
  }
}

/** Formats parameters as JSON with one line per parameter. */
function formatted(params) {
  const lines = Object.entries(params).map(([name, value]) => `  ${JSON.stringify(name)}: ${compact(value)}`);
  return lines.length ? `{\n${lines.join(",\n")}\n}` : "{}";
}

/** Formats a value as JSON on one line, with spaces after commas and colons. */
function compact(value) {
  return JSON.stringify(value, null, 1)
    .replace(/\n\s*/g, " ")
    .replace(/([[{]) | ([\]}])/g, "$1$2");
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** @param {Named | undefined} named */
function aboutNamed(named) {
  if (!named) return [];
  const properties = Object.entries(named.params_schema?.properties ?? {});
  const list = properties.map(([name, schema]) =>
    h("li", {}, h("code", {}, name), schema.description ? `: ${schema.description}` : ""),
  );
  return [named.description, list.length ? h("ul", { class: "schema" }, ...list) : ""];
}

const EMPTY = { array: [], boolean: false, integer: 0, number: 0, object: {}, string: "" };

/** Returns initial parameters: those that the schema requires, with its examples and defaults. */
function exampleOf(schema) {
  const required = new Set(schema?.required ?? []);
  const properties = Object.entries(schema?.properties ?? {}).filter(([name]) => required.has(name));
  return Object.fromEntries(
    properties.map(([name, each]) => [
      name,
      each.examples?.[0] ?? each.default ?? each.enum?.[0] ?? EMPTY[each.type] ?? null,
    ]),
  );
}
