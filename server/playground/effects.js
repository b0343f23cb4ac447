// The effect of processors on a token, and the first difference between two answers.

/** @typedef {import("./generation.js").Trace} Trace */
/** @typedef {import("./generation.js").Stage} Stage */

/**
 * @typedef {object} Effect
 * @property {"forced" | "forbidden" | "changed" | "none"} kind `forced`: only one token was left; `forbidden`: the most
 *   likely token was forbidden; `changed`: another token became the most likely
 * @property {number} shift share of the probability that moved to other tokens, from 0 to 1
 * @property {number} topBefore index of the most likely candidate before the processors
 * @property {number} topAfter index of the most likely candidate after the processors
 * @property {Stage} before the stage before the first processor
 * @property {Stage} after the stage of the last processor
 */

/** @param {number | null} logprob @returns {number} */
export function probability(logprob) {
  return logprob === null ? 0 : Math.exp(logprob);
}

/**
 * @param {Trace} trace
 * @returns {Effect | null} null: no processor ran
 */
export function effectOf(trace) {
  const first = trace.stages.findIndex((stage) => stage.stage === "processor");
  if (first < 1) return null;
  const before = trace.stages[first - 1];
  const after = trace.stages.findLast((stage) => stage.stage === "processor");
  const topBefore = mostLikely(before);
  const topAfter = mostLikely(after);
  return {
    kind: kindOf(before, after, topBefore, topAfter),
    shift: shiftOf(before, after),
    topBefore,
    topAfter,
    before,
    after,
  };
}

function kindOf(before, after, topBefore, topAfter) {
  if (after.num_allowed === 1 && before.num_allowed > 1) return "forced";
  if (after.logprobs[topBefore] === null) return "forbidden";
  return topBefore === topAfter ? "none" : "changed";
}

/** Returns the total variation distance over the candidates, a lower bound of the real one. */
function shiftOf(before, after) {
  const moved = before.logprobs.map((logprob, i) => Math.abs(probability(logprob) - probability(after.logprobs[i])));
  return Math.min(1, moved.reduce((sum, each) => sum + each, 0) / 2);
}

/** @param {Stage} stage @returns {number} index of the most likely candidate */
export function mostLikely(stage) {
  let best = 0;
  stage.logprobs.forEach((logprob, i) => {
    if ((logprob ?? -Infinity) > (stage.logprobs[best] ?? -Infinity)) best = i;
  });
  return best;
}

/**
 * Finds the first difference between two answers.
 * @param {import("./generation.js").Token[]} one
 * @param {import("./generation.js").Token[]} other
 * @returns {number} index of the first token that differs; -1 if there is none so far
 */
export function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  for (let i = 0; i < length; i++) {
    if (one[i].trace.token_id !== other[i].trace.token_id) return i;
  }
  return -1;
}
