// OpenAI's client for Node talks to a server that clients.py has started. It is found in the current folder.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.cwd(), "index.js"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const { BASE, KEY, TEXT } = process.env;
const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Once upon a time" }];
const tool = {
  name: "pick",
  parameters: {
    type: "object",
    properties: { n: { type: "integer", minimum: 1, maximum: 9 } },
    required: ["n"],
    additionalProperties: false,
  },
};
const schema = {
  type: "object",
  properties: { mood: { type: "string", enum: ["good", "bad"] } },
  required: ["mood"],
  additionalProperties: false,
};

function check(condition, what) {
  if (!condition) throw new Error(what);
}

const short = { model: "x", messages, max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(short);
check(whole.choices[0].message.content === TEXT, `whole: ${whole.choices[0].message.content}`);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...short, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
check(streamed === TEXT, `streamed: ${streamed}`);
const runner = client.chat.completions.stream(short);
check((await runner.finalContent()) === TEXT, "the stream of the helper");

const response_format = { type: "json_schema", json_schema: { name: "mood", schema, strict: true } };
const shaped = await client.chat.completions.create({ model: "x", messages, max_tokens: 64, response_format });
check(["good", "bad"].includes(JSON.parse(shaped.choices[0].message.content).mood), "the schema");

const tools = [{ type: "function", function: tool }];
const called = client.chat.completions.stream({
  model: "x",
  messages,
  max_tokens: 256,
  tools,
  tool_choice: { type: "function", function: { name: "pick" } },
  parallel_tool_calls: false,
});
const call = (await called.finalChatCompletion()).choices[0].message.tool_calls[0];
const { n } = JSON.parse(call.function.arguments);
check(call.function.name === "pick" && n >= 1 && n <= 9, "the call");

const response = await client.responses.create({ model: "x", input: "Once upon a time", max_output_tokens: 12, temperature: 0 });
check(response.output_text === TEXT, "the response");
const vectors = await client.embeddings.create({ model: "x", input: ["a cat", "a dog"] });
check(vectors.data.length === 2, "embeddings");
const models = [];
for await (const model of client.models.list()) models.push(model.id);
check((await client.models.retrieve(models[0])).id === models[0], "the model by its id");

for (const [wrong, kind] of [
  [{ temperature: -1 }, OpenAI.BadRequestError],
  [{ messages: "x" }, OpenAI.BadRequestError],
]) {
  const error = await client.chat.completions.create({ ...short, ...wrong }).catch((error) => error);
  check(error instanceof kind && error.message.includes(Object.keys(wrong)[0]), `${JSON.stringify(wrong)}: ${error}`);
}
const stranger = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "wrong", maxRetries: 0 });
check((await stranger.models.list().catch((error) => error)) instanceof OpenAI.AuthenticationError, "a wrong key");
const controller = new AbortController();
const endless = await client.chat.completions.create({ ...short, max_tokens: 100000, ignore_eos: true, stream: true }, { signal: controller.signal });
for await (const chunk of endless) {
  if (chunk.choices[0]?.delta?.content) controller.abort();
}
check((await client.chat.completions.create(short)).choices[0].message.content === TEXT, "the answer after a stream that was left");
console.log("Node's openai is served");
