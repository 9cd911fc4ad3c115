// Run by test_page.py: the page's parts that need no browser, on what comes in. A failure ends the process.
import assert from "node:assert/strict";

const folder = process.argv[2];
const { answer, events, timings, Refused } = await import(`${folder}/stream.js`);
const { pieces, split } = await import(`${folder}/prose.js`);

async function collect(text, size) {
  const bytes = new TextEncoder().encode(text);
  const body = new ReadableStream({
    start(control) {
      for (let i = 0; i < bytes.length; i += size) control.enqueue(bytes.slice(i, i + size));
      control.close();
    },
  });
  const found = [];
  for await (const data of events(body)) found.push(data);
  return found;
}

// however the bytes are cut, between the two of a line's end and inside a character too
const stream = ": keep-alive\r\n\r\ndata: wör🐟\r\ndata:ld\r\n\r\nevent: x\ndata:  two\n\nid: 1\n\ndata: three\r\rdata: lost";
for (let size = 1; size < 40; size += 1) {
  assert.deepEqual(await collect(stream, size), ["wör🐟\nld", " two", "three"], `pieces of ${size}`);
}

// an answer: its text, when it came, what it cost
const chunk = (more) => `data: ${JSON.stringify({ choices: [], ...more })}\n\n`;
const said = (content, finish_reason = null) => chunk({ choices: [{ delta: { content }, finish_reason }] });
let asked;
function serve(text, status = 200, headers = {}) {
  globalThis.fetch = async (path, options) => {
    asked = { path, ...options };
    return new Response(text, { status, headers });
  };
}
const usage = { prompt_tokens: 3, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 1 } };
serve(said("") + said("a") + said("b", "stop") + chunk({ usage }) + "data: [DONE]\n\n", 200, { "x-request-id": "r" });
let text = "";
const on = { text: (piece) => (text += piece) };
const told = await answer({ model: "m" }, "k", null, on);
assert.deepEqual([text, told.id, told.reason, told.usage], ["ab", "r", "stop", usage]);
assert.equal(asked.headers.authorization, "Bearer k");
assert.deepEqual(JSON.parse(asked.body), { model: "m", stream: true, stream_options: { include_usage: true } });
assert.deepEqual(
  timings({ begun: 100, first: 350, last: 1350, usage: { completion_tokens: 11 }, pieces: 3 }),
  ["first token 250 ms", "11 tokens", "10.0 tokens/s"],
);
assert.deepEqual(timings({ begun: 0, first: null, last: null, usage: null, pieces: 0 }), ["0 tokens"]);

// what goes wrong, in words
const refused = async (like) => assert.rejects(answer({}, "", null, on), (e) => e instanceof Refused && like(e));
serve('{"error": {"message": "queue: full"}}', 503, { "retry-after": "7" });
await refused((e) => e.message === "queue: full" && e.status === 503 && e.retryS === 7);
serve("<html>", 502);
await refused((e) => e.message === "The server says 502.");
serve(said("a") + chunk({ error: { message: "draining" } }));
await refused((e) => e.message === "draining");
serve(said("a"));
await refused((e) => e.message === "The answer broke off.");
globalThis.fetch = async () => { throw new TypeError("network"); };
await refused((e) => e.status === 0);

// blocks: every line is in one, in order, and code is never cut
const whole = "# One\ntwo\nthree\n\n- a\n  b\n- c\nd\n~~~js\n# x\n\n```\n~~~\n1. e\n```\nopen";
assert.deepEqual(split(whole), [
  { kind: "heading", body: "# One" },
  { kind: "text", body: "two\nthree" },
  { kind: "list", body: "- a\n  b\n- c" },
  { kind: "text", body: "d" },
  { kind: "code", body: "# x\n\n```", language: "js" },
  { kind: "list", body: "1. e" },
  { kind: "code", body: "open", language: "" },
]);
for (let end = 0; end <= whole.length; end += 1) {
  const words = split(whole.slice(0, end)).map((block) => block.body).join(" ").match(/\w+/g) ?? [];
  const wanted = whole.slice(0, end).replace(/~~~js/g, "").replace(/~~~j$/, "").match(/\w+/g) ?? [];
  assert.deepEqual(words, wanted, JSON.stringify(whole.slice(0, end)));
}

// marks inside a line
const shown = (text) => pieces(text).map(({ kind, text: part }) => (kind ? `<${kind} ${part}>` : part)).join("");
for (const [text, wanted] of [
  ["a `b` **c** *d*", "a <code b> <strong c> <em d>"],
  ["``a ` b`` 2 * 3 * 4 f(*x, *y)", "<code a ` b> 2 * 3 * 4 f(*x, *y)"],
  ["`` ` ` **a**", "`` <code  > <strong a>"],
  ["**a **b", "**a **b"],
  ["x*y*z *a* `", "x*y*z <em a> `"],
]) {
  assert.equal(shown(text), wanted);
}

// what only opens: as long as an answer may be, and done before anybody notices
for (const unit of ["**a ", "*a ", "`a``", "`", "- ", "# ", "1. x\n\n", "```\n", "~~~\n`", "* *", "\n \n"]) {
  const long = unit.repeat(200_000 / unit.length);
  for (const block of split(long)) pieces(block.body);
}
