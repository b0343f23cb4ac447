// The request's processor: an example, one of the server's processors, or the source in the editor.

import { ApiError, get, getText, post } from "./api.js";
import { announce, byId, h } from "./dom.js";
import { Drafts } from "./drafts.js";
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

/**
 * The panel. Calls `onChoose` when an example or a draft is chosen, `onEdit` when an input changes, `onRun` to run, and
 * `onRefused` if the server refuses to register the processor. `request` returns the whole page's inputs.
 */
export class ProcessorPanel {
  /**
   * @param {{
   *   onChoose: (request: Example | import("./share.js").Draft) => void, onEdit: () => void, onRun: () => void,
   *   onRefused: (error: ApiError) => void, request: () => import("./share.js").Draft,
   * }} listeners
   */
  constructor({ onChoose, onEdit, onRun, onRefused, request }) {
    this.onChoose = onChoose;
    this.onEdit = onEdit;
    this.onRefused = onRefused;
    this.request = request;
    this.drafts = new Drafts();
    this.choice = OWN; // that the inputs belong to: the list changes before an example is loaded
    this.asked = OWN; // the last that was chosen
    this.takesCode = false;
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
    byId("restore").addEventListener("click", () => this.#restoreExample());
    byId("delete-draft").addEventListener("click", () => this.#deleteDraft());
    byId("register").addEventListener("click", () => this.#register());
  }

  /**
   * @param {Example[]} examples
   * @param {Named[]} named
   * @param {boolean} takesCode whether the server runs code sent with requests
   */
  offer(examples, named, takesCode) {
    this.examples = examples;
    this.named = named;
    this.takesCode = takesCode;
    const ofKind = (kind) =>
      named.filter((each) => each.kind === kind).map(({ id }) => h("option", { value: `named:${id}` }, id));
    const ofExamples = examples.map(({ id, title }) => h("option", { value: `example:${id}` }, title));
    const registered = ofKind("registered");
    this.select.replaceChildren(
      h("optgroup", { label: "Examples", disabled: !takesCode }, ...ofExamples),
      h("option", { value: OWN, disabled: !takesCode }, "Your own code"),
      h("optgroup", { label: "Kept drafts", id: "kept-drafts", disabled: !takesCode }),
      registered.length ? h("optgroup", { label: "Registered" }, ...registered) : "",
      h("optgroup", { label: "Installed on the server" }, ...ofKind("installed")),
    );
  }

  /**
   * Shows a processor of the list: the user's draft of it if there is one.
   * @param {string} choice in the format of a draft
   * @returns {Promise<void>}
   */
  async choose(choice) {
    const [kind, id] = choice.split(/:(.*)/s);
    this.asked = choice;
    if (this.choice === OWN && this.editor.text()) this.drafts.put(this.request());
    const draft = this.drafts.get(choice);
    if (kind === "named") {
      const named = this.named.find((each) => each.id === id);
      if (!named) return;
      const params = draft?.params ?? formatted(exampleOf(named.params_schema));
      this.show({ choice, source: this.editor.text(), params });
      this.onEdit();
    } else if (draft) {
      this.show(draft);
      this.onChoose(draft);
    } else if (kind === "example") {
      const example = this.examples.find((each) => each.id === id);
      if (!example) return;
      const source = await sourceOf(example);
      if (this.asked !== choice) return; // another was chosen meanwhile
      this.show({ choice, source, params: formatted(example.params) });
      this.onChoose(example);
    } else {
      this.show({ choice, source: this.editor.text(), params: this.params.value });
      this.onEdit();
    }
  }

  /** @param {{choice: string, source: string, params: string}} draft */
  show({ choice, source, params }) {
    this.#offerKept();
    if (!this.#isListed(choice)) choice = OWN;
    this.choice = choice;
    this.select.value = choice;
    const isNamed = choice.startsWith("named:");
    if (!isNamed || source !== this.editor.text()) this.editor.open(choice, source);
    this.params.value = params;
    this.clearError();
    this.checkParams();
    byId("code").hidden = isNamed;
    this.showState();
  }

  /** Shows what the list has chosen, whether it is edited, and what can be done with it. */
  showState() {
    const isEdited = this.drafts.get(this.choice) !== null;
    byId("about").replaceChildren(...this.#about(this.choice));
    byId("restore").hidden = !(this.choice.startsWith("example:") && isEdited);
    byId("delete-draft").hidden = !this.choice.startsWith("kept:");
    byId("register").hidden = this.choice.startsWith("named:") || !this.takesCode;
    byId("registered").textContent = "";
  }

  /** @returns {{choice: string, source: string, params: string}} */
  draft() {
    return { choice: this.choice, source: this.editor.text(), params: this.params.value };
  }

  #isListed(choice) {
    return [...this.select.options].some((option) => option.value === choice);
  }

  #offerKept() {
    const options = this.drafts.kept().map(({ choice, source }) => {
      const time = new Date(Number(choice.slice("kept:".length))).toLocaleString();
      return h("option", { value: choice }, `${processorClass(source) || "no class"}, ${time}`);
    });
    const group = byId("kept-drafts");
    group.hidden = options.length === 0;
    group.replaceChildren(...options);
  }

  async #restoreExample() {
    const { choice } = this;
    const example = this.examples.find(({ id }) => choice === `example:${id}`);
    if (!example) return;
    const source = await sourceOf(example);
    if (this.choice !== choice) return;
    const draft = this.request();
    if (draft.source !== source) this.drafts.keep(draft);
    this.drafts.remove(choice);
    this.editor.replace(source); // before `show`, so that it can be undone
    this.show({ choice, source, params: formatted(example.params) });
    this.onChoose(example);
    announce("The example is as it was. Your edits are among the kept drafts.");
  }

  async #deleteDraft() {
    if (!confirm("Delete this draft?")) return;
    this.drafts.remove(this.choice);
    await this.choose(this.drafts.get(OWN) ? OWN : `example:${this.examples[0].id}`);
  }

  async #register() {
    const processor = this.processor();
    if (processor === null) return this.showError("The source defines no class.", "");
    try {
      const { id } = await post("v1/processors", processor);
      const { data } = await get("v1/processors");
      this.offer(this.examples, data, this.takesCode);
      this.#offerKept();
      this.select.value = this.choice;
      byId("registered").textContent = `Registered as ${id}: any request with your key can name it.`;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.onRefused(error);
    }
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
    byId("code-error").replaceChildren();
    this.onEdit();
  }

  /** Returns the text below the list. */
  #about(choice) {
    const [kind, id] = choice.split(/:(.*)/s);
    if (kind === "example") {
      const about = this.examples.find((each) => each.id === id)?.about ?? "";
      return [this.drafts.get(choice) ? `${about} Edited: your changes are stored in this browser.` : about];
    }
    if (kind === "kept") return ["A draft that would have been overwritten. It is stored in this browser."];
    if (kind === "named") return aboutNamed(this.named.find((each) => each.id === id));
    return ["Your own class. It is stored in this browser."];
  }
}

/** @param {Example} example @returns {Promise<string>} */
async function sourceOf(example) {
  return getText(`playground/examples/${example.id}.py`);
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
