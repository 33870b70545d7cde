// The page in headless Chromium, on its software GPU and on the processor: node page.mjs FOLDER [SHADERS]. The page was built in the first; the second is
// a file of shaders, which a test of the GPU device writes, for the browser's compiler.
// Needs playwright-core in the folder where it is started, and a Chromium (CHROMIUM names its program).

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join } from "node:path";

const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const [folder, shaders] = process.argv.slice(2);
const types = { ".html": "text/html", ".js": "text/javascript", ".wasm": "application/wasm" };
const server = createServer(async (request, response) => {
  const path = new URL(request.url, "http://page").pathname;
  const file = path === "/" ? "index.html" : path.slice(1);
  try {
    const bytes = await readFile(join(folder, file));
    response.setHeader("content-type", types[extname(file)] ?? "application/octet-stream").end(bytes);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const url = `http://127.0.0.1:${server.address().port}/`;
const software = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"];

/** What the page says of itself, and writes, for a query and flags of the browser. */
async function story(query, flags, prepare = "") {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", ...flags] });
  try {
    const page = await browser.newPage();
    const wrong = [];
    page.on("pageerror", (error) => wrong.push(String(error)));
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && wrong.push(message.text()));
    await page.route("**/favicon.ico", (route) => route.fulfill({ status: 204 }));
    if (prepare) await page.route("**/worker.js", async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, body: prepare + (await response.text()) });
    });
    page.setDefaultTimeout(40000);
    await page.goto(`${url}?temperature=0&tokens=60&seed=1&${query}`);
    const state = (expected) => page.waitForSelector(`#status[data-state=${expected}], #status[data-state=failed]`);
    await state("ready");
    const opened = await page.innerText("#status");
    if ((await page.getAttribute("#status", "data-state")) === "failed") return { opened, wrong };
    await page.click("button");
    await state("written");
    return { opened, text: await page.innerText("#story"), status: await page.innerText("#status"), wrong };
  } finally {
    await browser.close();
  }
}

const tests = {
  async "on the processor, without a GPU"() {
    const found = await story("", ["--disable-features=WebGPU,WebGPUService"], "delete WorkerNavigator.prototype.gpu;\n");
    assert.match(found.opened, /no GPU: .*this browser has no WebGPU/);
    return found;
  },
  async "on the processor, if asked"() {
    return story("device=cpu", software);
  },
  async "where the browser cannot suspend a program"() {
    const found = await story("", software, "delete WebAssembly.Suspending; delete WebAssembly.promising;\n");
    assert.match(found.opened, /cannot suspend/);
    return found;
  },
  async "on the GPU"() {
    return story("device=gpu", software);
  },
  async "the GPU is preferred"() {
    const found = await story("", software);
    assert.doesNotMatch(found.opened, /no GPU/);
    return found;
  },
};

/** Errors of the browser's compiler for pairs of names and sources. */
async function compiled(sources) {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", ...software] });
  const page = await browser.newPage();
  await page.goto(url);
  const errors = await page.evaluate(async (sources) => {
    const device = await (await navigator.gpu.requestAdapter()).requestDevice();
    device.onuncapturederror = (event) => event.preventDefault();
    const judged = sources.map(async ([name, code]) => {
      const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
      return messages.filter(({ type }) => type === "error").map(({ message, lineNum }) => `${name}:${lineNum}: ${message}`);
    });
    return (await Promise.all(judged)).flat();
  }, sources);
  await browser.close();
  return errors;
}

let failed = 0;
let expected;
for (const [name, test] of Object.entries(tests)) {
  try {
    const found = await test();
    assert.deepEqual(found.wrong, []);
    assert.ok(found.text?.length > 100, JSON.stringify(found));
    // The most likely words are the same everywhere.
    expected ??= found.text;
    assert.equal(found.text, expected);
    assert.match(found.status, name.includes("GPU") && !name.includes("without") ? /^GPU: .* tokens/ : /^CPU: .* tokens/);
    console.log(`ok: ${name}: ${found.status}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED: ${name}\n${error.stack}`);
  }
}
if (shaders) {
  const sources = JSON.parse(await readFile(shaders, "utf8"));
  const errors = await compiled(sources);
  failed += errors.length;
  console.log(errors.length === 0 ? `ok: ${sources.length} shaders` : errors.slice(0, 20).join("\n"));
}
server.close();
console.log(expected);
process.exit(failed ? 1 : 0);
