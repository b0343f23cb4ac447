// The page: connects the panels, and runs a request with and without its processor.

import { AnswerColumn } from "./answer_column.js";
import { ApiError, apiKey, get, setApiKey } from "./api.js";
import { program } from "./copy_as.js";
import { announce, byId } from "./dom.js";
import { firstDifference } from "./effects.js";
import { bodyOf } from "./generation.js";
import { ProcessorPanel } from "./processor_panel.js";
import { FieldError, markField, sampling, samplingFields, setSamplingFields } from "./sampling_panel.js";
import { loadDraft, pack, saveDraft, unpack } from "./share.js";
import { showTrace } from "./trace.js";

const prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
const keyDialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
const keyField = /** @type {HTMLInputElement} */ (byId("key"));
const runButton = /** @type {HTMLButtonElement} */ (byId("run"));
const stopButton = /** @type {HTMLButtonElement} */ (byId("stop"));

const columns = {
  without: new AnswerColumn("without", (index) => openTrace("without", index)),
  with: new AnswerColumn("with", (index) => openTrace("with", index)),
};
const panel = new ProcessorPanel({ onChoose: choose, onEdit: saveInputs, onRun: run, onRefused: refused, request: draft });
/** Name of the link that this tab has opened, so that a reload does not open it again. */
const OPENED = "logitship.playground.opened";
let model = "";

/** @type {AbortController | null} */
let running = null;

// --- inputs ---

/** @returns {"chat" | "raw"} */
const mode = () => (/** @type {HTMLInputElement} */ (byId("mode-raw")).checked ? "raw" : "chat");

function draft() {
  return { mode: mode(), prompt: prompt.value, sampling: samplingFields(), ...panel.draft() };
}

function saveInputs() {
  panel.drafts.put(draft());
  saveDraft(draft());
  panel.showState();
}

/** @param {{mode: "chat" | "raw", prompt: string, sampling: Record<string, string | number>}} values */
function showRequest(values) {
  /** @type {HTMLInputElement} */ (byId(`mode-${values.mode}`)).checked = true;
  prompt.value = values.prompt;
  setSamplingFields(values.sampling);
}

/** Shows the request of an example or a draft. */
function choose(request) {
  showRequest(request);
  saveDraft(draft());
}

function refused(error) {
  if (error.status === 401) askForKey(error.message);
  else panel.showError(error.message, error.traceback);
}

// --- running ---

async function run() {
  if (runButton.disabled) return; // it runs, or is not connected
  const request = readRequest();
  clearAnswers();
  if (!request) return;
  columns.with.title.textContent = `With ${panel.name()}`;
  const { processor, settings } = request;
  running = new AbortController();
  setRunning(true);
  const { signal } = running;
  const runColumn = (column, attached) =>
    column.run(mode(), bodyOf(mode(), prompt.value, settings, attached), signal, markDifference);
  const [plain, processed] = await Promise.all([runColumn(columns.without, null), runColumn(columns.with, processor)]);
  running = null;
  setRunning(false);
  if (plain) showError(plain, columns.without);
  if (processed) showError(processed, columns.with);
  if (!plain && !processed) announce(signal.aborted ? "Stopped." : "Both answers are complete.");
}

/** Reads the request from the inputs. Returns null, and shows the error, if an input is invalid. */
function readRequest() {
  clearErrors();
  const params = panel.checkParams();
  if (params === null) return refuse("The parameters are not valid JSON.", panel.params);
  const processor = panel.processor();
  if (processor === null) {
    panel.showError("The source defines no class. Define a subclass of CustomLogitProcessor.", "");
    return null;
  }
  try {
    return { processor: { processor, params }, settings: sampling() };
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    markField(error.field);
    return refuse(`${error.message}.`, byId(`sampling-${error.field}`));
  }
}

function refuse(message, field) {
  banner(message);
  field.focus();
  return null;
}

function clearErrors() {
  panel.clearError();
  markField(null);
  banner("");
}

function clearAnswers() {
  Object.values(columns).forEach((column) => column.clear());
  byId("trace").hidden = true;
}

function setRunning(is) {
  runButton.disabled = is;
  stopButton.disabled = !is;
  byId("results").setAttribute("aria-busy", String(is));
  if (is) announce("Running.");
  // On a narrow screen the answers are below the request, possibly out of view.
  if (is && !matchMedia("(min-width: 68rem)").matches) byId("results").scrollIntoView();
}

function markDifference() {
  const index = firstDifference(columns.without.tokens, columns.with.tokens);
  if (index >= 0) Object.values(columns).forEach((column) => column.view.markDifference(index));
}

function showError(error, column) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) return askForKey(error.message);
  const isProcessors = error.type === "ProcessorFault" || error.param?.startsWith("custom_logit_processor");
  if (isProcessors) panel.showError(error.message, error.traceback);
  else if (error.param) markField(error.param);
  announce(`${column.title.textContent}: ${error.message.split("\n")[0]}`);
}

// --- traces ---

function openTrace(which, index) {
  const column = columns[which];
  const other = columns[which === "with" ? "without" : "with"];
  other.view.unchoose();
  const { trace } = column.tokens[index];
  const chosen = { trace, index, length: column.tokens.length, column: column.title.textContent };
  const host = byId("trace");
  host.hidden = false;
  showTrace(host, chosen, (to) => column.view.choose(to));
  // On a narrow screen the trace is below the answers, possibly out of view.
  if (!matchMedia("(min-width: 68rem)").matches) host.scrollIntoView({ block: "start" });
  announce(byId("trace").querySelector(".summary").textContent);
}

// --- the server ---

async function connect() {
  try {
    const [info, processors, examples] = await Promise.all([
      get("server_info"),
      get("v1/processors"),
      get("playground/examples/index.json"),
    ]);
    model = info.served_model_name;
    byId("server").textContent = model;
    panel.offer(examples, processors.data, info.enable_custom_logit_processor);
    await restore(info.enable_custom_logit_processor);
    runButton.disabled = running !== null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) askForKey(apiKey() ? error.message : "");
    else banner(error.message);
  }
}

/** Restores the inputs from the link, else from the last visit, else from the first example. */
async function restore(takesCode) {
  const shared = await sharedDraft();
  const stored = loadDraft();
  const last = shared ?? (stored && (panel.drafts.get(stored.choice) ?? stored));
  byId("notice").hidden = takesCode;
  const isNamed = panel.named.some(({ id }) => last?.choice === `named:${id}`);
  if (last && (takesCode || isNamed)) {
    if (shared?.choice === "own") {
      const before = panel.drafts.get("own") ?? (stored?.choice === "own" ? stored : null);
      if (before?.source !== shared.source) panel.drafts.keep(before);
      panel.drafts.put(shared);
    }
    showRequest(last);
    panel.show(last);
    saveDraft(draft());
  } else {
    await panel.choose(takesCode ? "example:lipogram" : `named:${panel.named[0]?.id}`);
  }
}

async function sharedDraft() {
  try {
    const isOpen = opened() === location.hash;
    const found = isOpen ? null : await unpack(location.hash);
    opened(location.hash);
    // A changed example is the sender's own code.
    return found?.choice.startsWith("kept:") ? { ...found, choice: "own" } : found;
  } catch {
    banner("The link is damaged and cannot be read. Ask for a new one.");
    return null;
  }
}

/** Returns the link that this tab has opened, or sets it. */
function opened(hash) {
  try {
    if (hash !== undefined) sessionStorage.setItem(OPENED, hash);
    return sessionStorage.getItem(OPENED);
  } catch {
    return null; // storage is forbidden
  }
}

// --- copy as ---

function showProgram() {
  const request = readRequest();
  if (!request) return;
  const { stream: _stream, trace: _trace, ...body } = bodyOf(mode(), prompt.value, request.settings, request.processor);
  const chosen = /** @type {HTMLInputElement} */ (document.querySelector("input[name=format]:checked"));
  const url = new URL(".", location.href).href.replace(/\/$/, "");
  const format = /** @type {import("./copy_as.js").Format} */ (chosen.value);
  byId("program").textContent = program(format, { mode: mode(), body, model, url });
  byId("program-copy").textContent = "Copy";
  const dialog = /** @type {HTMLDialogElement} */ (byId("program-dialog"));
  if (!dialog.open) dialog.showModal();
}

async function copyProgram() {
  try {
    await navigator.clipboard.writeText(byId("program").textContent);
    byId("program-copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("program")); // the clipboard is allowed only on https and localhost
    byId("program-copy").textContent = "Press Ctrl+C";
  }
}

function askForKey(message) {
  byId("key-error").textContent = message;
  keyField.value = apiKey();
  if (!keyDialog.open) keyDialog.showModal();
}

/** @param {string} text the error; "" hides the banner */
function banner(text) {
  byId("banner").hidden = !text;
  byId("banner").textContent = text;
}

// --- events ---

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("request").addEventListener("input", (event) => {
  if (event.target !== panel.select) saveInputs(); // `choose` stores what the list changes
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.defaultPrevented) return;
  if (document.querySelector("dialog[open]")) return;
  event.preventDefault();
  run();
});
stopButton.addEventListener("click", () => running?.abort());
byId("key-open").addEventListener("click", () => askForKey(""));
byId("key-close").addEventListener("click", () => keyDialog.close());
byId("key-form").addEventListener("submit", () => {
  setApiKey(keyField.value.trim());
  connect();
});
byId("share").addEventListener("click", async () => {
  const inputs = draft();
  const isOwn = panel.drafts.get(inputs.choice) !== null && !inputs.choice.startsWith("named:");
  const hash = await pack(isOwn ? { ...inputs, choice: "own" } : inputs);
  history.replaceState(null, "", hash);
  opened(hash);
  try {
    await navigator.clipboard.writeText(location.href);
    announce("The link was copied to the clipboard.");
    byId("share").querySelector("[data-label]").textContent = "Copied";
  } catch {
    announce("The link is in the address bar."); // browsers allow clipboard access only on https and localhost
    byId("share").querySelector("[data-label]").textContent = "See address bar";
  }
});
byId("copy-as").addEventListener("click", showProgram);
byId("program-copy").addEventListener("click", copyProgram);
byId("program-close").addEventListener("click", () => /** @type {HTMLDialogElement} */ (byId("program-dialog")).close());
document.querySelectorAll("input[name=format]").forEach((input) => input.addEventListener("change", showProgram));
addEventListener("hashchange", connect);

connect();
