// What a processor did to the choice of a token, and where two answers part.

/** @typedef {import("./generation.js").Trace} Trace */
/** @typedef {import("./generation.js").Stage} Stage */

/**
 * @typedef {object} Effect
 * @property {"forced" | "forbidden" | "changed" | "none"} kind `forced`: one token was left; `forbidden`: the most
 *   likely one was not; `changed`: another became the most likely
 * @property {number} shift from 0 to 1, how much of the probability moved to other tokens
 * @property {number} topBefore index of the candidate that was the most likely before
 * @property {number} topAfter and after
 * @property {Stage} before the stage before the first processor
 * @property {Stage} after that of the last
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

/** Total variation distance; of the candidates alone, so it may be a little more. */
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
 * Where two answers part.
 * @param {import("./generation.js").Token[]} one
 * @param {import("./generation.js").Token[]} other
 * @returns {number} index of the first token that is not the same in both; -1 as long as there is none
 */
export function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  for (let i = 0; i < length; i++) {
    if (one[i].trace.token_id !== other[i].trace.token_id) return i;
  }
  return -1;
}
