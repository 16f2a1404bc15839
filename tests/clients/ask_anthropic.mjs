// Sends the requests of a file through Anthropic's SDK for node: whole, through its stream helper, and as raw events;
// prints the answers.
// node ask_anthropic.mjs URL MODEL FILE [EXTRA FIELDS AS JSON]

import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model, file, more = "{}"] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const cases = JSON.parse(readFileSync(file, "utf8"));
const answers = {};
for (const [name, { messages }] of Object.entries(cases)) {
  const asked = { model, ...messages, ...JSON.parse(more) };
  const whole = await client.messages.create(asked);
  const events = [];
  for await (const event of await client.messages.create({ ...asked, stream: true })) events.push(event);
  const texts = [];
  const stream = client.messages.stream(asked).on("text", (text) => texts.push(text));
  answers[name] = { whole, events, helped: await stream.finalMessage(), texts };
}
const models = [];
for await (const each of client.models.list()) models.push(each.id);
console.log(JSON.stringify({ answers, models }));
