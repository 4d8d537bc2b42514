// The official npm clients of OpenAI, Anthropic and Ollama against a running server.
//
//     xtask/clients.sh                 starts a server with the bundled model and runs this
//     node clients.mjs ADDRESS FOLDER  against a server that runs, with the node_modules of a folder

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [address, folder] = process.argv.slice(2);
const { resolve: find } = createRequire(resolve(folder, "package.json"));
const load = async (name) => import(pathToFileURL(find(name)));
const { default: OpenAI } = await load("openai");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { Ollama } = await load("ollama");

const openai = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const claude = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const llama = new Ollama({ host: address });
const model = (await openai.models.list()).data[0].id;
const messages = [{ role: "user", content: "Tell me a story about a lamp that cannot sleep" }];
const schema = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] }, count: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["colour", "count"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "paint", description: "Paints.", parameters: schema } };

// What a call of the tool must have.
function painted({ colour, count }) {
  assert.ok(["red", "green"].includes(colour) && Number.isInteger(count) && count >= 1 && count <= 9);
}

async function chat() {
  const options = { model, messages, max_tokens: 24, temperature: 0 };
  const whole = await openai.chat.completions.create(options);
  const text = whole.choices[0].message.content;
  assert.ok(text && whole.usage.completion_tokens === 24 && whole.choices[0].finish_reason === "length");
  let streamed = "";
  for await (const chunk of await openai.chat.completions.create({ ...options, stream: true })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(streamed, text);
  assert.equal((await openai.models.retrieve(model)).id, model);
  await assert.rejects(openai.chat.completions.create({ ...options, model: "absent" }), OpenAI.NotFoundError);
  await assert.rejects(openai.chat.completions.create({ ...options, functions: [{ name: "f" }] }), OpenAI.BadRequestError);
  return text;
}

async function tools() {
  const options = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 400 };
  const whole = await openai.chat.completions.create(options);
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  painted(JSON.parse(whole.choices[0].message.tool_calls[0].function.arguments));
  // The client puts the pieces of the arguments together.
  const last = await openai.chat.completions.stream(options).finalChatCompletion();
  painted(JSON.parse(last.choices[0].message.tool_calls[0].function.arguments));
  const format = { type: "json_schema", json_schema: { name: "painting", schema } };
  const structured = await openai.chat.completions.create({ model, messages, response_format: format, max_tokens: 200 });
  painted(JSON.parse(structured.choices[0].message.content));
}

async function responses() {
  const options = { model, input: messages[0].content, max_output_tokens: 24, temperature: 0 };
  const whole = await openai.responses.create(options);
  assert.ok(whole.output_text && whole.status === "incomplete");
  const last = await openai.responses.stream(options).finalResponse();
  assert.equal(last.output_text, whole.output_text);
  const own = { type: "function", name: "paint", description: "Paints.", parameters: schema, strict: true };
  const asked = { model, input: messages[0].content, tools: [own], tool_choice: "required", parallel_tool_calls: false };
  const call = (await openai.responses.stream(asked).finalResponse()).output.find((item) => item.type === "function_call");
  painted(JSON.parse(call.arguments));
}

async function anthropic(text) {
  const options = { model, messages, max_tokens: 24, temperature: 0 };
  const whole = await claude.messages.create(options);
  assert.equal(whole.content[0].text, text);
  const last = await claude.messages.stream(options).finalMessage();
  assert.equal(last.content[0].text, text);
  assert.equal(last.stop_reason, "max_tokens");
  assert.ok((await claude.messages.countTokens({ model, messages })).input_tokens > 0);
  const own = { name: "paint", description: "Paints.", input_schema: schema };
  const choice = { type: "any", disable_parallel_tool_use: true };
  const called = await claude.messages.stream({ ...options, max_tokens: 400, tools: [own], tool_choice: choice }).finalMessage();
  assert.equal(called.stop_reason, "tool_use");
  painted(called.content.find((block) => block.type === "tool_use").input);
  await assert.rejects(claude.messages.create({ ...options, model: "absent" }), Anthropic.NotFoundError);
}

async function ollama(text) {
  const options = { num_predict: 24, temperature: 0 };
  const whole = await llama.chat({ model, messages, options });
  assert.equal(whole.message.content, text);
  let streamed = "";
  for await (const part of await llama.chat({ model, messages, options, stream: true })) streamed += part.message.content;
  assert.equal(streamed, text);
  painted(JSON.parse((await llama.chat({ model, messages, format: schema, options: { num_predict: 200 } })).message.content));
  assert.equal((await llama.list()).models[0].model, `${model}:latest`);
  assert.equal((await llama.ps()).models[0].model, `${model}:latest`);
  assert.ok((await llama.show({ model })).model_info["general.architecture"]);
  await assert.rejects(llama.chat({ model: "absent", messages }), /absent/);
  // It goes, and comes back with the next request.
  assert.equal((await llama.generate({ model, prompt: "", keep_alive: 0 })).done_reason, "unload");
  assert.ok((await llama.ps()).models.every((loaded) => loaded.model !== model));
  assert.equal((await llama.chat({ model, messages, options, keep_alive: "10m" })).message.content, text);
}

async function embeddings() {
  const options = { model: "embeds", input: [[3, 4, 5], [6]] };
  const packed = await openai.embeddings.create(options);
  const plain = await openai.embeddings.create({ ...options, encoding_format: "float" });
  packed.data.forEach((item, i) => {
    assert.equal(item.embedding.length, 48);
    item.embedding.forEach((x, j) => assert.ok(Math.abs(x - plain.data[i].embedding[j]) < 1e-6));
  });
}

async function gone() {
  const stream = await openai.chat.completions.create({ model, messages, max_tokens: 900, stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  stream.controller.abort();
  assert.ok((await openai.chat.completions.create({ model, messages, max_tokens: 1 })).usage.completion_tokens === 1);
}

const text = await chat();
await tools();
await responses();
await anthropic(text);
await embeddings();
await gone();
await ollama(text);
console.log("openai, @anthropic-ai/sdk and ollama of npm: all as they expect");
