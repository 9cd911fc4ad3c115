// Jobs with the NATS client for Node.js: publish three, wait for their answers.
//
//     npm ci && node jobs.js nats://127.0.0.1:4222 [MODEL]
import { connect, nuid } from "nats";

const [url = "nats://127.0.0.1:4222", model = "fake"] = process.argv.slice(2);
const prompts = { one: "Tell me of the sea.", two: "And of the wind.", three: "Good night." };

const connection = await connect({ servers: url });
const stream = connection.jetstream();
const queue = `example-${nuid.next()}`;

for (const [key, content] of Object.entries(prompts)) {
  const body = { model, messages: [{ role: "user", content }], max_tokens: 8, temperature: 0 };
  const job = { custom_id: key, method: "POST", url: "/v1/chat/completions", body };
  try {
    await stream.publish(`shoal.job.-.${queue}.${key}`, JSON.stringify(job));
  } catch (error) {
    // after a publish of unknown fate: it is there already
    if (!String(error.message).includes("maximum messages per subject exceeded")) throw error;
  }
}

const consumer = await stream.consumers.get("ANSWERS", { filterSubjects: `shoal.ans.-.${queue}.*` });
const answers = await consumer.consume();
let left = Object.keys(prompts).length;
for await (const message of answers) {
  const { custom_id, response, error } = message.json();
  if (error !== null || response.status_code !== 200) {
    console.log(custom_id, "failed:", JSON.stringify(error ?? response.body.error));
  } else {
    console.log(custom_id, response.body.choices[0].message.content);
  }
  if (--left === 0) break;
}
await connection.close();
