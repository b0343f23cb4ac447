// The request as a program: with logitship's client, with curl, and with the openai package.

import { apiKey } from "./api.js";

/** @typedef {"python" | "curl" | "openai"} Format */

/**
 * @typedef {object} Request
 * @property {"chat" | "raw"} mode
 * @property {object} body of the request, without `stream` and `trace`
 * @property {string} model that the server serves
 * @property {string} url base URL of the server, without a slash at the end
 */

/**
 * @param {Format} format
 * @param {Request} request
 * @returns {string}
 */
export function program(format, request) {
  return { python, curl, openai }[format](request);
}

/** @param {Request} request */
function python({ mode, body, url }) {
  const { custom_logit_processor: processor, custom_params, messages, prompt, ...sampling } = body;
  const isCode = "source" in processor;
  const options = {
    ...(isCode ? {} : { processor: literal(processor.name) }),
    ...(isCode ? { processor: processor.class_name } : {}),
    params: literal(custom_params),
    ...Object.fromEntries(Object.entries(sampling).map(([name, value]) => [name, literal(value)])),
  };
  const call = mode === "chat" ? "chat" : "completions";
  const key = apiKey() ? ', api_key=os.environ["LOGITSHIP_API_KEY"]' : "";
  return [
    ...(isCode ? [processor.source.trim(), "", ""] : []), // first: it may import from __future__
    ...(key ? ["import os", ""] : []),
    "from logitship import Client",
    "",
    `with Client(${literal(url)}${key}) as client:`,
    `    answer = client.${call}(`,
    `        ${literal(mode === "chat" ? messages : prompt)},`,
    ...Object.entries(options).map(([name, value]) => `        ${name}=${value},`),
    "    )",
    "    print(answer.text)",
    "",
  ].join("\n");
}

/** @param {Request} request */
function curl({ mode, body, url }) {
  const key = apiKey() ? ' -H "Authorization: Bearer $LOGITSHIP_API_KEY"' : "";
  const json = JSON.stringify(body, null, 2); // line feeds of the source are escaped: no line of it ends the text
  const quoted = `'${`${url}/${path(mode)}`.replaceAll("'", "'\\''")}'`; // zsh expands the brackets of an IPv6 address
  return `curl ${quoted} -H 'Content-Type: application/json'${key} -d @- <<'END'\n${json}\nEND\n`;
}

/** @param {Request} request */
function openai({ mode, body, model, url }) {
  const { custom_logit_processor, custom_params, messages, prompt, top_k, min_p, ...standard } = body;
  const extra = {
    custom_logit_processor,
    custom_params,
    ...(top_k === undefined ? {} : { top_k }),
    ...(min_p === undefined ? {} : { min_p }),
  };
  const key = apiKey() ? 'os.environ["LOGITSHIP_API_KEY"]' : '"none"';
  const isCode = "source" in custom_logit_processor;
  const named = isCode ? { ...extra, custom_logit_processor: undefined } : extra;
  const entries = Object.entries(named).map(([name, value]) =>
    name === "custom_logit_processor" && isCode
      ? `        "${name}": {"source": SOURCE, "class_name": ${literal(custom_logit_processor.class_name)}},`
      : `        "${name}": ${literal(value)},`,
  );
  const input = mode === "chat" ? { messages } : { prompt };
  return [
    ...(apiKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    ...(isCode ? [`SOURCE = ${block(custom_logit_processor.source)}`, ""] : []),
    `client = OpenAI(base_url=${literal(`${url}/v1`)}, api_key=${key})`,
    `answer = client.${mode === "chat" ? "chat.completions" : "completions"}.create(`,
    `    model=${literal(model)},`,
    ...Object.entries({ ...input, ...standard }).map(([name, value]) => `    ${name}=${literal(value)},`),
    "    extra_body={",
    ...entries,
    "    },",
    ")",
    `print(answer.choices[0].${mode === "chat" ? "message.content" : "text"})`,
    "",
  ].join("\n");
}

const path = (mode) => (mode === "chat" ? "v1/chat/completions" : "v1/completions");

/** Returns a value of JSON as a literal of Python. */
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([name, each]) => `${literal(name)}: ${literal(each)}`)
      .join(", ")}}`;
  }
  return JSON.stringify(value); // strings of JSON are strings of Python
}

/** Returns a text as a string of Python over several lines. */
function block(text) {
  return `"""\\\n${text.trim().replaceAll("\\", "\\\\").replaceAll('"""', '\\"\\"\\"')}\n"""`;
}
