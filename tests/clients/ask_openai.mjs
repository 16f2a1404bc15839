// Sends the requests of a file through openai-node, whole and streamed, and prints the answers.
// node ask_openai.mjs BASE_URL MODEL FILE

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model, file] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const found = {};
for (const [name, { route, body, extra }] of Object.entries(JSON.parse(readFileSync(file, "utf8")))) {
  const api = { completions: client.completions, chat: client.chat.completions }[route];
  const asked = { model, ...body, ...extra };
  const { choices, usage } = await api.create(asked);
  const chunks = [];
  const stream = await api.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) chunks.push(chunk);
  found[name] = { whole: { choices, usage }, chunks };
}
console.log(JSON.stringify(found));
