// Parser of server-sent events with JSON data, up to `[DONE]`.

/**
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<any>} the data of each event
 * @throws if `[DONE]` is missing: the response is incomplete
 */
export async function* readEvents(body) {
  let rest = "";
  for await (const text of texts(body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // the blank line after each event
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("its end is missing");
}

/** Decodes the stream. Safari has no `for await` over streams. */
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // the caller may have stopped early
  }
}
