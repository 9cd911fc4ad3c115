// Asks Shoal over gRPC: node chat.js [--address HOST:PORT]... [--max-tokens N] [--timeout SECONDS] QUESTION
//
// The schema is read as it is (proto/gateway.proto): nothing is generated. Text goes to standard output, the request
// id to standard error. A lost stream goes on at the next address, with exactly the rest: Accepted brings the
// request's id, each delta its ids, and Resume tells what follows them. Ctrl-C cancels the request.
//
// SHOAL_API_KEY is sent with each call. SHOAL_CA names a file of root certificates, for gateways with TLS.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", multiple: true, default: ["127.0.0.1:50051"] },
    "max-tokens": { type: "string" },
    temperature: { type: "string" },
    timeout: { type: "string", default: "120" },
  },
});
if (positionals.length !== 1) {
  console.error("one QUESTION, please");
  process.exit(2);
}

// 64-bit numbers come as strings: a seed may be larger than JavaScript's integers
const schema = fileURLToPath(new URL("../../proto/gateway.proto", import.meta.url));
const loaded = loadSync(schema, { keepCase: true, longs: String, defaults: true, oneofs: true });
const { Inference } = grpc.loadPackageDefinition(loaded).shoal.v1;

const ca = process.env.SHOAL_CA;
const credentials = ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure();
const clients = values.address.map((address) => new Inference(address, credentials));
const metadata = new grpc.Metadata();
if (process.env.SHOAL_API_KEY) metadata.set("authorization", `Bearer ${process.env.SHOAL_API_KEY}`);
const deadline = Date.now() + Number(values.timeout) * 1000;

const request = { chat: { turns: [{ role: "user", content: positionals[0] }] }, resume_window_s: 30 };
if (values["max-tokens"]) request.max_tokens = Number(values["max-tokens"]);
if (values.temperature) request.temperature = Number(values.temperature);

let at = 0; // whom to ask
let id = ""; // of the request, once it is accepted
const held = []; // output ids whose text is written
let cancelled = false;

/** Reads one stream to its end: the Finished event, or null if it was lost before. */
async function read(stream) {
  let end = null;
  for await (const { event, accepted, delta, finished } of stream) {
    if (event === "accepted" && !id) {
      id = accepted.request_id;
      console.error(`request ${id}, seed ${accepted.seed}`);
    } else if (event === "delta") {
      process.stdout.write(delta.text);
      held.push(...delta.ids);
    } else if (event === "finished") {
      end = finished;
    }
  }
  return end;
}

async function ask() {
  for (let failures = 0; ; ) {
    const client = clients[at % clients.length];
    const before = held.length;
    try {
      const options = { deadline };
      const stream = id
        ? client.Resume({ request_id: id, output_ids: held }, metadata, options)
        : client.Generate(request, metadata, options);
      const end = await read(stream);
      if (end) return end;
    } catch (error) {
      failures = held.length > before ? 1 : failures + 1;
      // UNAVAILABLE: nobody answered, or there is no room now; all else is an answer
      if (error.code !== grpc.status.UNAVAILABLE || failures > 20) throw error;
      console.error(`lost: ${error.details}`);
    }
    at += 1;
    await new Promise((resolve) => setTimeout(resolve, 50 * 2 ** Math.min(failures, 5) * (0.5 + Math.random() / 2)));
  }
}

process.on("SIGINT", () => {
  if (cancelled || !id) process.exit(130);
  cancelled = true; // the stream goes on to its Finished, "cancelled"
  clients[at % clients.length].Cancel({ request_id: id }, metadata, () => {});
});

try {
  const end = await ask();
  process.stdout.write("\n");
  console.error(`${end.reason}: ${end.output_tokens} tokens after ${end.prompt_tokens} of prompt`);
} catch (error) {
  console.error(`${grpc.status[error.code] ?? "ERROR"}: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  for (const client of clients) client.close();
}
