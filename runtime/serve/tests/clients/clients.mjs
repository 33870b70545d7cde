// Node's clients talk to a server that clients.py has started, in the loops that programs usually
// contain. The packages are found in the current folder.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.cwd(), "index.js"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { BASE, KEY, TEXT } = process.env;
const messages = [{ role: "user", content: "Once upon a time" }];
const description = "Picks a number";
const parameters = {
  type: "object",
  properties: { n: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["n"],
  additionalProperties: false,
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

const isPicked = ({ n }) => n >= 1 && n <= 9;

async function withOpenAI() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0 });
  const short = { model: "x", messages, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(short);
  check(whole.choices[0].message.content === TEXT, `whole: ${whole.choices[0].message.content}`);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...short, stream: true })) {
    streamed += chunk.choices[0].delta.content ?? "";
  }
  check(streamed === TEXT, `streamed: ${streamed}`);
  const runner = client.chat.completions.stream(short);
  check((await runner.finalContent()) === TEXT, "the stream of the helper");

  const response_format = { type: "json_schema", json_schema: { name: "mood", schema, strict: true } };
  const shaped = await client.chat.completions.create({ model: "x", messages, max_tokens: 64, response_format });
  check(["good", "bad"].includes(JSON.parse(shaped.choices[0].message.content).mood), "the schema");

  const called = {
    model: "x",
    messages,
    max_tokens: 256,
    tools: [{ type: "function", function: { name: "pick", description, parameters } }],
    tool_choice: { type: "function", function: { name: "pick" } },
    parallel_tool_calls: false,
  };
  const joined = { name: "", arguments: "" };
  for await (const chunk of await client.chat.completions.create({ ...called, stream: true })) {
    for (const call of chunk.choices[0].delta.tool_calls ?? []) {
      joined.name += call.function.name ?? "";
      joined.arguments += call.function.arguments ?? "";
    }
  }
  check(joined.name === "pick" && isPicked(JSON.parse(joined.arguments)), "the call in a stream");
  const final = await client.chat.completions.stream(called).finalChatCompletion();
  const call = final.choices[0].message.tool_calls[0];
  check(call.function.name === "pick" && isPicked(JSON.parse(call.function.arguments)), "the call");
  const { refusal, parsed, ...answer } = final.choices[0].message;
  const after = [...messages, answer, { role: "tool", tool_call_id: call.id, content: "7" }];
  const next = await client.chat.completions.create({ ...short, messages: after });
  check(next.choices.length === 1, "the answer behind a call");

  const asked = { model: "x", input: "Once upon a time", max_output_tokens: 12, temperature: 0 };
  const response = await client.responses.create(asked);
  check(response.output_text === TEXT, "the response");
  let deltas = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") deltas += event.delta;
  }
  check(deltas === TEXT, "the response in a stream");
  const vectors = await client.embeddings.create({ model: "x", input: ["a cat", "a dog"] });
  check(vectors.data.length === 2, "embeddings");
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  check((await client.models.retrieve(models[0])).id === models[0], "the model by its id");

  for (const wrong of [{ temperature: -1 }, { messages: "x" }]) {
    const error = await client.chat.completions.create({ ...short, ...wrong }).catch((error) => error);
    const isNamed = error instanceof OpenAI.BadRequestError && error.message.includes(Object.keys(wrong)[0]);
    check(isNamed, `${JSON.stringify(wrong)}: ${error}`);
  }
  const stranger = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: "wrong", maxRetries: 0 });
  check((await stranger.models.list().catch((error) => error)) instanceof OpenAI.AuthenticationError, "a wrong key");
  const controller = new AbortController();
  const endless = { ...short, max_tokens: 100000, ignore_eos: true, stream: true };
  for await (const chunk of await client.chat.completions.create(endless, { signal: controller.signal })) {
    if (chunk.choices[0].delta.content) controller.abort();
  }
  const again = await client.chat.completions.create(short);
  check(again.choices[0].message.content === TEXT, "the answer after a stream that was left");
}

async function withAnthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
  const short = { model: "x", messages, max_tokens: 12, temperature: 0 };
  const whole = await client.messages.create(short);
  check(whole.content[0].text === TEXT && whole.stop_reason === "max_tokens", "the message");
  let streamed = "";
  for await (const event of await client.messages.create({ ...short, stream: true })) {
    if (event.type === "content_block_delta" && event.delta.type === "text_delta") streamed += event.delta.text;
  }
  check(streamed === TEXT, `streamed: ${streamed}`);
  check((await client.messages.stream(short).finalText()) === TEXT, "the stream of the helper");
  const tools = [{ name: "pick", description, input_schema: parameters }];
  const called = { ...short, max_tokens: 256, tools, tool_choice: { type: "any", disable_parallel_tool_use: true } };
  for (const answer of [await client.messages.create(called), await client.messages.stream(called).finalMessage()]) {
    const call = answer.content.find((block) => block.type === "tool_use");
    check(answer.stop_reason === "tool_use" && call.name === "pick" && isPicked(call.input), "the call");
    const result = { type: "tool_result", tool_use_id: call.id, content: "7" };
    const after = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
    const next = await client.messages.create({ ...short, messages: after, tools });
    check(next.content.length > 0, "the answer behind a call");
  }
  check((await client.messages.countTokens({ model: "x", messages })).input_tokens > 3, "the count");
  const error = await client.messages.create({ ...short, max_tokens: -5 }).catch((error) => error);
  check(error instanceof Anthropic.BadRequestError && error.message.includes("max_tokens"), `${error}`);
}

async function withOllama() {
  const { Ollama } = await load("ollama");
  const client = new Ollama({ host: BASE, headers: { Authorization: `Bearer ${KEY}` } });
  const model = (await client.list()).models[0].model;
  const options = { num_predict: 12, temperature: 0 };
  const whole = await client.chat({ model, messages, options });
  check(whole.message.content === TEXT && whole.done_reason === "length", "the message");
  let streamed = "";
  for await (const part of await client.chat({ model, messages, options, stream: true })) {
    streamed += part.message.content;
  }
  check(streamed === TEXT, `streamed: ${streamed}`);
  let generated = "";
  for await (const part of await client.generate({ model, prompt: "Once upon a time", options, stream: true })) {
    generated += part.response;
  }
  check(generated === TEXT, `generated: ${generated}`);
  const shaped = await client.chat({ model, messages, format: schema, options: { num_predict: 64 } });
  check(["good", "bad"].includes(JSON.parse(shaped.message.content).mood), "the schema");
  // Whether it calls is the model's decision.
  const tools = [{ type: "function", function: { name: "pick", description, parameters } }];
  const offered = await client.chat({ model, messages, tools, options });
  check(typeof offered.message.content === "string", "the answer to tools");
  const calls = [{ function: { name: "pick", arguments: { n: 7 } } }];
  const after = [...messages, { role: "assistant", content: "", tool_calls: calls }, { role: "tool", tool_name: "pick", content: "7" }];
  check((await client.chat({ model, messages: after, tools, options })).done, "the answer behind a call");
  check((await client.embed({ model, input: ["a", "b"] })).embeddings.length === 2, "embeddings");
  const error = await client.chat({ model: "not-there", messages }).catch((error) => error);
  check(error.status_code === 404, `a model that is not there: ${error}`);
}

async function withLangChain() {
  const { ChatOpenAI } = await load("@langchain/openai");
  const { HumanMessage, ToolMessage } = await load("@langchain/core/messages");
  const fields = { model: "x", apiKey: KEY, maxRetries: 0, temperature: 0, configuration: { baseURL: `${BASE}/v1` } };
  const short = new ChatOpenAI({ ...fields, maxTokens: 12 });
  const ask = [new HumanMessage("Once upon a time")];
  check((await short.invoke(ask)).content === TEXT, "the message");
  let streamed = "";
  for await (const part of await short.stream(ask)) streamed += part.content;
  check(streamed === TEXT, `streamed: ${streamed}`);
  const long = new ChatOpenAI({ ...fields, maxTokens: 256 });
  const tool = { type: "function", function: { name: "pick", description, parameters } };
  const bound = long.bindTools([tool], { tool_choice: "pick", parallel_tool_calls: false });
  const called = await bound.invoke(ask);
  const [call] = called.tool_calls;
  check(call.name === "pick" && isPicked(call.args), "the call");
  let joined;
  for await (const part of await bound.stream(ask)) joined = joined ? joined.concat(part) : part;
  check(isPicked(joined.tool_calls[0].args), "the call in a stream");
  const result = new ToolMessage({ content: "7", tool_call_id: call.id });
  const after = await short.bindTools([tool]).invoke([...ask, called, result]);
  check(after.response_metadata.finish_reason.length > 0, "the answer behind a call");
  const shaped = await long.withStructuredOutput({ title: "mood", ...schema }, { method: "jsonSchema" }).invoke(ask);
  check(["good", "bad"].includes(shaped.mood), "the schema");
}

await withOpenAI();
await withAnthropic();
await withOllama();
await withLangChain();
console.log("Node's clients of OpenAI, Anthropic, ollama and LangChain are served");
