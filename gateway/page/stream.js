// Server-sent events of a fetched body, and one answer of /v1/chat/completions: no DOM in here.

/** Raised for what the server refused; `status` is 0 when it did not answer at all. */
export class Refused extends Error {
  constructor(message, status, retryS = null) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

/** The data of each event of a stream of bytes, however they are cut. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += value ?? "";
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

export function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** Asks, and throws Refused unless the answer is a good one. */
export async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", 0);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const retry = Number(response.headers.get("retry-after"));
  throw new Refused(
    said?.error?.message ?? `The server says ${response.status}.`,
    response.status,
    Number.isFinite(retry) && retry > 0 ? retry : null,
  );
}

/** Streams one answer. `on.text(piece)` as it comes; gives what there is to say of it at the end. */
export async function answer(request, key, signal, on) {
  const begun = performance.now();
  const told = { id: "", reason: "", first: null, last: null, pieces: 0, usage: null, begun };
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  told.id = response.headers.get("x-request-id") ?? "";
  on.accepted?.(told);
  let whole = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      whole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message ?? "The answer broke off.", 500);
    if (chunk.usage) told.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const piece = choice.delta?.content;
    if (piece) {
      told.last = performance.now();
      told.first ??= told.last;
      told.pieces += 1;
      on.text(piece);
    }
    if (choice.finish_reason) told.reason = choice.finish_reason;
  }
  if (!whole && !told.reason) throw new Refused("The answer broke off.", 0);
  return told;
}

/** What an answer cost, in words. */
export function timings(told) {
  const said = [];
  if (told.first !== null) {
    const wait = told.first - told.begun;
    said.push(`first token ${wait < 1000 ? `${Math.round(wait)} ms` : `${(wait / 1000).toFixed(1)} s`}`);
  }
  const tokens = told.usage?.completion_tokens ?? told.pieces;
  said.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (tokens > 1 && told.last > told.first) {
    said.push(`${(((tokens - 1) * 1000) / (told.last - told.first)).toFixed(1)} tokens/s`);
  }
  if (told.usage?.prompt_tokens) {
    const cached = told.usage.prompt_tokens_details?.cached_tokens;
    said.push(`${told.usage.prompt_tokens} of prompt${cached ? `, ${cached} cached` : ""}`);
  }
  return said;
}
