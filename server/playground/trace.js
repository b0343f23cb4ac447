// The trace of a token: the probabilities of its candidates at each stage, as a table of bars.

import { h } from "./dom.js";
import { effectOf, probability } from "./effects.js";
import { count, percent, visible } from "./text.js";

/** @typedef {import("./generation.js").Trace} Trace */
/** @typedef {import("./generation.js").Stage} Stage */

const SHOWN = 10;
/** The table scrolls if it is too wide for the screen, by keyboard too. */
const BARS = { class: "bars-scroll", tabindex: "0", role: "region", "aria-label": "Probabilities" };
const STAGE_NAMES = { model: "Model", request: "Request", sampling: "Sampling" };

/**
 * @typedef {object} Chosen
 * @property {Trace} trace
 * @property {number} index of the token in its answer
 * @property {number} length of the answer so far, in tokens
 * @property {string} column title of the answer's column
 */

/**
 * Shows a trace.
 * @param {HTMLElement} host
 * @param {Chosen} chosen
 * @param {(index: number) => void} onMove called to go to another token
 */
export function showTrace(host, chosen, onMove) {
  let isWhole = false;
  const render = () => {
    const more = h("button", { type: "button", class: "quiet more", onclick: () => toggle() });
    const hidden = chosen.trace.candidates.length - Math.min(SHOWN, chosen.trace.candidates.length);
    more.textContent = isWhole ? "Show fewer" : `Show ${hidden} more`;
    host.replaceChildren(
      heading(host, chosen, onMove),
      h("p", { class: "summary" }, summary(chosen.trace)),
      h("div", BARS, table(chosen.trace, isWhole)),
      hidden ? more : "",
    );
  };
  const toggle = () => {
    isWhole = !isWhole;
    render();
    /** @type {HTMLElement} */ (host.querySelector(".more")).focus();
  };
  render();
}

function heading(host, { trace, index, length, column }, onMove) {
  const move = (label, text, to) => {
    const attributes = { type: "button", class: "quiet", "aria-label": label, disabled: to < 0 || to >= length };
    const onclick = () => {
      onMove(to);
      // The buttons were rendered again. At an end of the answer the same one is disabled: focus the other.
      const enabled = [...host.querySelectorAll(".steps button:enabled")];
      const same = enabled.find((button) => button.getAttribute("aria-label") === label);
      /** @type {HTMLElement | undefined} */ (same ?? enabled[0])?.focus();
    };
    return h("button", { ...attributes, onclick }, text);
  };
  return h(
    "div",
    { class: "trace-head" },
    h(
      "h2",
      { id: "trace-title" },
      h("code", { class: "chip" }, visible(trace.text)),
      ` token ${index + 1} of ${length}`,
    ),
    h("span", { class: "muted" }, `${column} · id ${trace.token_id}`),
    h("span", { class: "steps" }, move("Previous token", "‹", index - 1), move("Next token", "›", index + 1)),
  );
}

/**
 * Summarizes the effect on the choice of the token.
 * @param {Trace} trace
 * @returns {string}
 */
export function summary(trace) {
  const effect = effectOf(trace);
  const sampled = trace.candidates.findIndex((candidate) => candidate.token_id === trace.token_id);
  const last = trace.stages[trace.stages.length - 1];
  const chance =
    last.num_allowed === 1
      ? "Sampling left only the sampled token."
      : `Sampled with ${percent(probability(last.logprobs[sampled]))}.`;
  if (effect === null) return `No processor ran. ${chance}`;
  const token = (index) => `“${visible(trace.candidates[index].text)}”`;
  const { before, after, topBefore, topAfter } = effect;
  const was = `${token(topBefore)}, which had ${percent(probability(before.logprobs[topBefore]))}`;
  const newlyForbidden = before.num_allowed - after.num_allowed;
  const forbade = newlyForbidden > 0 ? ` ${count(newlyForbidden)} tokens were forbidden.` : "";
  const happened = {
    forced: `Forced: only ${token(topAfter)} was left. The first choice was ${was}.`,
    forbidden: `The first choice was forbidden: ${was}.${forbade} ${chance}`,
    changed: `The first choice changed to ${token(topAfter)}. It was ${was}.${forbade} ${chance}`,
    none: `The first choice stayed ${token(topBefore)}; ${percent(effect.shift)} of the probability moved.${forbade} ${chance}`,
  };
  return happened[effect.kind];
}

function table(trace, isWhole) {
  const stages = distinct(trace.stages);
  const rows = isWhole ? trace.candidates.map((_, index) => index) : mostLikelyRows(trace, stages);
  return h(
    "table",
    { class: "bars" },
    h("caption", { class: "visually-hidden" }, "Probability of the most likely tokens at each stage"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Token"), ...stages.map(column))),
    h("tbody", {}, ...rows.map((index) => row(trace, stages, index))),
  );
}

/** Drops the request's stage if it changed nothing. */
function distinct(stages) {
  const [model] = stages;
  return stages.filter(
    (stage) => stage.stage !== "request" || stage.logprobs.some((logprob, i) => logprob !== model.logprobs[i]),
  );
}

/** Returns the candidates with the highest probability at any stage, and the sampled one, in their order. */
function mostLikelyRows(trace, stages) {
  const sampled = trace.candidates.findIndex((candidate) => candidate.token_id === trace.token_id);
  const best = (index) =>
    Math.max(...stages.map((stage) => probability(stage.logprobs[index])), index === sampled ? 2 : 0);
  const order = trace.candidates.map((_, index) => index).sort((one, other) => best(other) - best(one));
  return order.slice(0, SHOWN).sort((one, other) => one - other);
}

function column(stage) {
  const name = stage.name ? `${stage.name}${stage.again ? " (again)" : ""}` : STAGE_NAMES[stage.stage];
  const kind = stage.num_allowed === 1 ? "1 token left" : `${count(stage.num_allowed)} tokens`;
  return h("th", { scope: "col" }, h("span", { class: "stage" }, name), h("span", { class: "allowed" }, kind));
}

function row(trace, stages, index) {
  const candidate = trace.candidates[index];
  const isSampled = candidate.token_id === trace.token_id;
  const isForbidden = stages.some((stage) => stage.stage !== "sampling" && stage.logprobs[index] === null);
  return h(
    "tr",
    { class: isSampled ? "sampled" : isForbidden ? "barred" : null, "data-token-id": candidate.token_id },
    h(
      "th",
      { scope: "row" },
      h("code", { class: "chip" }, visible(candidate.text)),
      isSampled ? h("span", { class: "badge" }, "sampled") : "",
    ),
    ...stages.map((stage, position) => cell(stages, position, index)),
  );
}

function cell(stages, position, index) {
  const stage = stages[position];
  const logprob = stage.logprobs[index];
  const attributes = { class: stage.stage, "data-stage": stage.stage };
  if (logprob === null) {
    const wasAllowed = position === 0 || stages[position - 1].logprobs[index] !== null;
    const word = stage.stage === "sampling" ? "filtered" : "forbidden";
    // Shown once, at the stage where it happens; later stages have a dash.
    return h("td", { ...attributes, class: `${stage.stage} out` }, wasAllowed ? word : "—");
  }
  const share = probability(logprob);
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", share.toFixed(4));
  const forced = stage.num_allowed === 1 && stage.stage === "processor";
  return h("td", attributes, bar, h("span", { class: "value" }, forced ? "forced" : percent(share)));
}
