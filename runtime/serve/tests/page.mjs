// The page in headless Chromium, with the program's own model: node page.mjs PROGRAM [folder for screenshots].
// Needs playwright-core in the folder where it is started, and a Chromium (CHROMIUM names its program).

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { copyFile, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const [program, pictures] = process.argv.slice(2);

/** A server, and where its page is. */
async function started(...flags) {
  const server = spawn(program, ["serve", "--port", "0", ...flags], { stdio: ["ignore", "ignore", "pipe"] });
  const url = await new Promise((resolve, reject) => {
    createInterface({ input: server.stderr }).on("line", (line) => {
      const found = /served at (http:\S+)/.exec(line);
      if (found) resolve(found[1]);
    });
    server.on("exit", (code) => reject(new Error(`the server ended with ${code}`)));
    server.on("error", reject);
  });
  server.removeAllListeners("exit");
  return { server, url };
}

const { server, url } = await started();
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });

/** A page whose errors fail the test. */
async function opened(options = {}, address = url, prepare = () => {}) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 760 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(60000);
  page.wrong = [];
  page.on("pageerror", (error) => page.wrong.push(String(error)));
  page.on("console", (message) => message.type() === "error" && page.wrong.push(message.text()));
  await prepare(page);
  await page.goto(address);
  await page.waitForSelector(".hint button");
  return page;
}

/** A page that is told that the model sees images. It keeps its requests in `asked`. */
async function sighted(options) {
  const page = await opened(options, url, async (page) => {
    await page.route("**/props*", async (route) => {
      const response = await route.fetch();
      const modalities = { vision: true, audio: false };
      await route.fulfill({ response, json: { ...(await response.json()), modalities } });
    });
    page.asked = [];
    await page.route("**/v1/chat/completions", (route) => {
      page.asked.push(route.request().postDataJSON());
      const chunk = { choices: [{ delta: { content: "A cat." } }] };
      const body = `data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n`;
      return route.fulfill({ contentType: "text/event-stream", body });
    });
  });
  await page.waitForSelector("#add-image:not([hidden])");
  return page;
}

/** Images of a colour, as files for inputs. */
async function imageFiles(page, ...colours) {
  const urls = await page.evaluate((colours) => colours.map(([colour, kind]) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 300, height: 200 });
    const context = canvas.getContext("2d");
    context.fillStyle = colour;
    context.fillRect(20, 20, 260, 160);
    return canvas.toDataURL(`image/${kind}`);
  }), colours);
  return urls.map((url, at) => {
    const [colour, kind] = colours[at];
    const buffer = Buffer.from(url.split(",")[1], "base64");
    return { name: `${colour}.${kind}`, mimeType: `image/${kind}`, buffer, url };
  });
}

async function picture(page, name) {
  if (pictures) await page.screenshot({ path: `${pictures}/${name}.png` });
}

const GIF = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
const gif = {
  name: "dot.gif",
  mimeType: "image/gif",
  buffer: Buffer.from(GIF, "base64"),
  url: `data:image/gif;base64,${GIF}`,
};

const thumbnails = (page, place) => page.locator(`${place} .images img`);

/** Waits until so many thumbnails show their images. */
async function showsImages(page, place, count) {
  await page.waitForFunction(([place, count]) => {
    const found = [...document.querySelectorAll(`${place} .images img`)];
    return found.length === count && found.every((image) => image.naturalWidth > 0);
  }, [place, count]);
}

/** Gives the page files by an event that has them, as pasting and dropping do. */
async function dispatch(page, kind, files, texts = {}) {
  const given = files.map((file) => [file.name, file.mimeType, file.buffer.toString("base64")]);
  await page.evaluate(([kind, given, texts]) => {
    const data = new DataTransfer();
    for (const [name, type, content] of given) {
      const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
      data.items.add(new File([bytes], name, { type }));
    }
    for (const [type, text] of Object.entries(texts)) data.setData(type, text);
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
      ? new ClipboardEvent(kind, { ...options, clipboardData: data })
      : new DragEvent(kind, { ...options, dataTransfer: data });
    document.getElementById("text").dispatchEvent(event);
  }, [kind, given, texts]);
}

const status = (page) => page.locator("#status").innerText();
/** Waits for a message in the status line. */
const says = (page, pattern) => page.waitForFunction(
  (source) => new RegExp(source).test(document.getElementById("status").textContent),
  pattern.source,
);
/** Waits until the control with this name has the focus. */
const isFocused = (page, name) => page.waitForFunction(
  (name) => document.activeElement.getAttribute("aria-label") === name,
  name,
);
/** Returns whether the composer shows that files can be dropped. */
const isDropping = (page) => page.evaluate(() =>
  getComputedStyle(document.getElementById("composer"), "::after").content.includes("Drop"));
const textPart = (text) => ({ type: "text", text });
const partOf = ({ url }) => ({ type: "image_url", image_url: { url } });
const storedImages = (page) => page.evaluate(() => new Promise((resolve) => {
  indexedDB.open("samite-images").onsuccess = ({ target }) => {
    const store = target.result.transaction("images").objectStore("images");
    store.count().onsuccess = ({ target: { result } }) => {
      target.result.close();
      resolve(result);
    };
  };
}));

const idle = (page) => page.waitForFunction(() => document.getElementById("send").textContent === "Send");
const answers = (page) => page.locator(".message.assistant .body");

async function set(page, values) {
  await page.click("#settings-open");
  for (const [name, value] of Object.entries(values)) await page.fill(`#settings [name=${name}]`, value);
  await page.click("#settings button[value=save]");
}

async function ask(page, text) {
  await page.fill("#text", text);
  await page.keyboard.press("Enter");
  await page.waitForSelector(".message.assistant");
  await idle(page);
}

/** Controls without names, in the page. */
const nameless = () =>
  [...document.querySelectorAll("button, input:not([hidden]), textarea, select")]
    .filter((control) => !control.textContent.trim() && !control.getAttribute("aria-label"))
    .filter((control) => !control.labels?.length)
    .map((control) => control.outerHTML);

const tests = {
  async "a conversation: ask, regenerate, edit, keep"() {
    const page = await opened();
    await picture(page, "begin");
    await set(page, { max_tokens: "24", seed: "7", temperature: "0" });
    await ask(page, "Once upon a time");
    const first = await answers(page).innerText();
    assert.ok(first.length > 20, first);
    assert.match(await page.locator(".stats[title]").innerText(), /24 tokens, [\d.]+ tokens\/s · \d+ of \d+ prompt tokens known/);
    await picture(page, "answer");
    await page.click("text=Regenerate");
    await page.waitForTimeout(100);
    await idle(page);
    assert.equal(await answers(page).innerText(), first);
    // The whole prompt but its last token is known by now.
    const [known, all] = /(\d+) of (\d+) prompt/.exec(await page.locator(".stats[title]").innerText()).slice(1).map(Number);
    assert.equal(known, all - 1);
    await page.click("text=Edit");
    await page.fill(".message textarea", "Lily and Ben went");
    await page.keyboard.press("Enter");
    await page.waitForTimeout(100);
    await idle(page);
    assert.notEqual(await answers(page).innerText(), first);
    await ask(page, "The end?");
    assert.equal(await page.locator(".message").count(), 4);
    // It is there again after a reload, and gone when it is deleted.
    await page.reload();
    await page.click("#list .open");
    assert.equal(await page.locator(".message").count(), 4);
    assert.match(await page.locator(".message.user .body").first().innerText(), /Lily and Ben/);
    page.on("dialog", (dialog) => dialog.accept());
    await page.click("#list .drop");
    await page.waitForSelector(".hint");
    assert.equal(await page.locator("#list li").count(), 0);
    return page;
  },

  async "an answer is stopped"() {
    const page = await opened();
    // A server that writes a word now and then, until nobody listens.
    await page.evaluate(() => {
      window.fetch = async (path, { signal }) => {
        let timer;
        const word = `data: ${JSON.stringify({ choices: [{ delta: { content: "word " } }] })}\n\n`;
        const stream = new ReadableStream({
          start(controller) {
            timer = setInterval(() => controller.enqueue(new TextEncoder().encode(word)), 20);
            signal.addEventListener("abort", () => {
              clearInterval(timer);
              controller.error(signal.reason);
            });
          },
          cancel: () => clearInterval(timer),
        });
        return new Response(stream);
      };
    });
    await page.fill("#text", "Once upon a time");
    await page.click("#send");
    await page.waitForFunction(() => document.querySelector(".message.assistant .body")?.textContent.length > 20);
    assert.equal(await page.locator("#send").innerText(), "Stop");
    await page.keyboard.press("Escape");
    await idle(page);
    assert.equal(await page.locator("#status").innerText(), "Stopped.");
    assert.ok((await answers(page).innerText()).length > 20);
    return page;
  },

  async "an answer goes on beside another conversation, and outlives a reload"() {
    const page = await opened();
    // A server that writes a word now and then, until it is told to end.
    await page.evaluate(() => {
      window.fetch = async () => {
        let count = 0;
        const stream = new ReadableStream({
          async pull(controller) {
            await new Promise((resolve) => setTimeout(resolve, 20));
            if (window.isOver) return controller.close();
            count += 1;
            const chunk = { choices: [{ delta: { content: `word${count} ` } }] };
            controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\n\n`));
          },
        });
        return new Response(stream);
      };
    });
    const written = (least) => page.waitForFunction((least) => document.querySelector(".message.assistant .body")?.textContent.length > least, least);
    await page.fill("#text", "Once upon a time");
    await page.click("#send");
    await written(10);
    await page.click("#new");
    assert.equal(await page.locator("#send").innerText(), "Send");
    assert.equal(await page.locator(".message").count(), 0);
    await page.click("#list .open");
    assert.equal(await page.locator("#send").innerText(), "Stop");
    await written(60);
    await page.evaluate(() => (window.isOver = true));
    await idle(page);
    assert.match(await answers(page).innerText(), /^word1 word2 .* word\d+$/);
    await page.evaluate(() => (window.isOver = false));
    // Of an answer that a reload breaks off, what came is kept.
    await page.click("#new");
    await page.fill("#text", "And then");
    await page.click("#send");
    await written(10);
    // What came is saved each second.
    const isSaved = () => page.evaluate(async () => {
      const { all } = await import(new URL("store.js", location));
      const found = await all();
      return found.some(({ messages }) => messages[0].content === "And then" && messages.at(-1).content.length > 20);
    });
    for (let tries = 0; !(await isSaved()); tries += 1) {
      assert.ok(tries < 300, "nothing of the answer is saved");
      await page.waitForTimeout(100);
    }
    await page.reload();
    await page.click("#list .open");
    assert.match(await answers(page).innerText(), /^word1 word2 /);
    return page;
  },

  async "what was edited or regenerated is still there"() {
    const page = await opened();
    await set(page, { max_tokens: "6", temperature: "0" });
    await ask(page, "Once upon a time");
    const first = await answers(page).innerText();
    await page.click("text=Edit");
    await page.fill(".message textarea", "Lily and Ben went");
    await page.keyboard.press("Enter");
    await page.waitForTimeout(100);
    await idle(page);
    await ask(page, "The end?");
    assert.equal(await page.locator(".message").count(), 4);
    const version = page.locator(".message.user .tools").first();
    assert.match(await version.innerText(), /2 \/ 2/);
    await page.click('[aria-label="Previous version"]');
    assert.equal(await page.locator(".message").count(), 2);
    assert.equal(await answers(page).innerText(), first);
    // A change is saved although the database is busy when the page is reloaded.
    await page.click('[aria-label="Next version"]');
    await page.evaluate(() => new Promise((resolve) => {
      indexedDB.open("samite").onsuccess = ({ target }) => {
        const store = target.result.transaction("conversations", "readwrite").objectStore("conversations");
        const stayBusy = () => (store.count().onsuccess = stayBusy);
        stayBusy();
        document.querySelector('[aria-label="Previous version"]').click();
        setTimeout(() => location.reload(), 20);
        resolve();
      };
    }));
    await page.waitForSelector(".hint button");
    await page.click("#list .open");
    assert.equal(await page.locator(".message").count(), 2);
    await page.click('[aria-label="Next version"]');
    assert.equal(await page.locator(".message").count(), 4);
    assert.match(await page.locator(".message.user .body").first().innerText(), /Lily and Ben/);
    return page;
  },

  async "answers keep to a schema, and one that is no JSON is refused"() {
    const page = await opened();
    await page.click("#settings-open");
    await page.fill("#settings [name=schema]", "{");
    await page.click("#settings button[value=save]");
    assert.match(await page.locator("#schema-error").innerText(), /no JSON/);
    await picture(page, "settings");
    await page.keyboard.press("Escape");
    await set(page, { schema: '{"enum": ["yes", "no"]}', max_tokens: "20" });
    await ask(page, "Well?");
    assert.match(await answers(page).innerText(), /^"(yes|no)"$/);
    return page;
  },

  async "files are part of the message"() {
    const page = await opened();
    await set(page, { max_tokens: "4" });
    await page.setInputFiles("#file", { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("A cat sat.") });
    await page.waitForSelector("#files .chip");
    const sent = page.waitForRequest("**/v1/chat/completions");
    await ask(page, "Go on");
    assert.match((await sent).postDataJSON().messages[0].content, /^File notes\.txt:\n\nA cat sat\.\n\nGo on$/);
    return page;
  },

  async "images are attached, pasted, dropped and removed, and sent as parts"() {
    const page = await sighted({ permissions: ["clipboard-read", "clipboard-write"] });
    const kinds = [["red", "png"], ["green", "jpeg"], ["blue", "webp"]];
    const [red, green, blue] = await imageFiles(page, ...kinds);
    const accepted = await page.getAttribute("#image-file", "accept");
    assert.equal(accepted, "image/png,image/jpeg,image/webp,image/gif");
    const chooser = page.waitForEvent("filechooser");
    await page.click("#add-image");
    await (await chooser).setFiles([red, green]);
    await showsImages(page, "#images", 2);
    assert.equal(await status(page), "Added red.png, green.jpeg.");
    // From the system's clipboard.
    await page.evaluate(async (content) => {
      const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
      const type = "image/png";
      await navigator.clipboard.write([new ClipboardItem({ [type]: new Blob([bytes], { type }) })]);
    }, red.buffer.toString("base64"));
    await page.focus("#text");
    await page.keyboard.press("Control+V");
    await showsImages(page, "#images", 3);
    await dispatch(page, "paste", [blue]);
    await showsImages(page, "#images", 4);
    assert.ok(!(await isDropping(page)));
    await dispatch(page, "dragover", [gif]);
    assert.ok(await isDropping(page));
    await picture(page, "images-drop");
    await dispatch(page, "dragleave", [gif]);
    assert.ok(!(await isDropping(page)));
    await dispatch(page, "dragover", [gif]);
    await dispatch(page, "drop", [gif]);
    assert.ok(!(await isDropping(page)));
    await showsImages(page, "#images", 5);
    // Dragged text is no file.
    await dispatch(page, "dragover", [], { "text/plain": "words" });
    assert.ok(!(await isDropping(page)));
    // Spreadsheets copy text with an image of it.
    await dispatch(page, "paste", [red], { "text/plain": "1", "text/html": "<b>1</b>" });
    assert.equal(await thumbnails(page, "#images").count(), 5);
    await picture(page, "images-composer");
    const read = await page.locator("#images").ariaSnapshot();
    assert.match(read, /^- list "Images":\n  - listitem:\n    - button "Enlarge red\.png"/);
    // Removing an image by keyboard moves the focus to the next one, or to the text.
    await page.focus('#images li:nth-child(3) [aria-label="Remove image.png"]');
    await page.keyboard.press("Enter");
    await isFocused(page, "Remove blue.webp");
    assert.equal(await status(page), "Removed image.png.");
    await page.focus('[aria-label="Remove dot.gif"]');
    await page.keyboard.press("Space");
    await isFocused(page, "Message");
    await showsImages(page, "#images", 3);
    await ask(page, "What is this?");
    const content = [...[red, green, blue].map(partOf), textPart("What is this?")];
    assert.deepEqual(page.asked[0].messages, [{ role: "user", content }]);
    assert.equal(await thumbnails(page, "#images").count(), 0);
    await showsImages(page, ".message.user", 3);
    await picture(page, "images-message");
    // A message without images is a plain string, and one may have images alone.
    await page.fill("#text", "Why?");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll(".message.assistant").length === 2);
    await idle(page);
    const [again, ...rest] = page.asked[1].messages;
    assert.deepEqual(again.content, content);
    assert.equal(rest[1].content, "Why?");
    await page.click("#new");
    const notes = { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("A cat sat.") };
    await page.setInputFiles("#file", [gif, notes]);
    await page.waitForSelector("#files .chip");
    await ask(page, "");
    const text = textPart("File notes.txt:\n\nA cat sat.\n\n");
    assert.deepEqual(page.asked[2].messages[0].content, [partOf(gif), text]);
    await page.click("#new");
    await page.setInputFiles("#image-file", gif);
    await ask(page, "");
    assert.deepEqual(page.asked[3].messages[0].content, [partOf(gif)]);
    assert.equal(await page.locator(".message.user .body").count(), 0);
    assert.equal(await page.locator("#list .open").first().innerText(), "dot.gif");
    // Nothing but this server and the page's own blobs may be shown.
    const headers = await page.evaluate(async () => [...(await fetch(location)).headers]);
    assert.match(new Map(headers).get("content-security-policy"), /; img-src 'self' blob:;/);
    return page;
  },

  async "images stay with their conversation: reload, regenerate, edit, export, delete"() {
    const page = await sighted();
    const files = await imageFiles(page, ["red", "png"], ["green", "png"]);
    await page.setInputFiles("#image-file", files);
    await ask(page, "What is this?");
    await page.reload();
    await page.waitForSelector("#add-image:not([hidden])");
    await page.click("#list .open");
    await showsImages(page, ".message.user", 2);
    // One of them is shown large, until Escape.
    await page.click('[aria-label="Enlarge green.png"]');
    await page.waitForFunction(() => {
      return document.querySelector("#image[open] img")?.naturalWidth === 300;
    });
    assert.equal(await page.locator("#image img").getAttribute("alt"), "green.png");
    await picture(page, "images-large");
    await page.keyboard.press("Escape");
    await isFocused(page, "Enlarge green.png");
    await page.keyboard.press("Enter");
    await page.click("#image button");
    assert.equal(await page.locator("#image").isVisible(), false);
    const again = async (act, count) => {
      const sent = page.waitForRequest("**/v1/chat/completions");
      await act();
      await sent;
      await idle(page);
      await showsImages(page, ".message.user", count);
      return page.asked.at(-1).messages[0].content;
    };
    const parts = files.map(partOf);
    const regenerated = await again(() => page.click("text=Regenerate"), 2);
    assert.deepEqual(regenerated, [...parts, textPart("What is this?")]);
    assert.equal(page.asked.length, 2);
    await page.click("text=Edit");
    await showsImages(page, ".message.user", 2);
    await page.fill(".message textarea", "What are these?");
    const edited = await again(() => page.keyboard.press("Enter"), 2);
    assert.deepEqual(edited, [...parts, textPart("What are these?")]);
    // An edit can remove images. The version before still has them.
    await page.click("text=Edit");
    await page.click('.message.user [aria-label="Remove red.png"]');
    const less = await again(() => page.click('.message.user >> text="Send"'), 1);
    assert.deepEqual(less, [parts[1], textPart("What are these?")]);
    await page.click('[aria-label="Previous version"]');
    await showsImages(page, ".message.user", 2);
    const download = page.waitForEvent("download");
    await page.click("#export");
    const exported = JSON.parse(await readFile(await (await download).path(), "utf8"));
    const urls = exported.messages[0].images.map(({ id }) => exported.images[id]);
    assert.deepEqual(urls, files.map(({ url }) => url));
    // Another conversation keeps its own when this one is deleted.
    await page.click("#new");
    await page.setInputFiles("#image-file", gif);
    await ask(page, "And this?");
    assert.equal(await storedImages(page), 3);
    page.on("dialog", (dialog) => dialog.accept());
    await page.click('[aria-label="Delete What is this?"]');
    await page.waitForFunction(() => document.querySelectorAll("#list li").length === 1);
    for (let tries = 0; (await storedImages(page)) !== 1; tries += 1) {
      assert.ok(tries < 100, "images of a deleted conversation stay");
      await page.waitForTimeout(50);
    }
    // An image that the browser has lost is left out, and the message says so.
    await page.evaluate(() => new Promise((resolve) => {
      indexedDB.open("samite-images").onsuccess = ({ target: { result } }) => {
        result.transaction("images", "readwrite").objectStore("images").clear().onsuccess = resolve;
        result.close();
      };
    }));
    const alone = await again(() => page.click("text=Regenerate"), 1);
    assert.deepEqual(alone, [textPart("And this?")]);
    await page.reload();
    await page.waitForSelector("#add-image:not([hidden])");
    await page.click("#list .open");
    await page.waitForSelector('.message.user .images >> text="dot.gif: not stored"');
    // All are deleted with all conversations.
    await page.click("#new");
    await page.setInputFiles("#image-file", gif);
    await ask(page, "And now?");
    assert.equal(await storedImages(page), 1);
    await page.click("#settings-open");
    await page.click("#forget");
    await page.waitForSelector(".hint");
    assert.equal(await storedImages(page), 0);
    return page;
  },

  async "images that nothing can see, or that are too large or broken, are refused"() {
    const blind = await opened();
    assert.equal(await blind.locator("#add-image").isVisible(), false);
    for (const kind of ["paste", "drop"]) {
      await blind.click("#new");
      assert.equal(await status(blind), "");
      await dispatch(blind, kind, [gif]);
      assert.match(await status(blind), /does not see images: .*--mmproj/);
      assert.equal(await thumbnails(blind, "#images").count(), 0);
    }
    await picture(blind, "images-blind");
    assert.deepEqual(blind.wrong, []);
    await blind.context().close();
    const page = await sighted();
    const [red] = await imageFiles(page, ["red", "png"]);
    const large = Buffer.alloc((20 << 20) + 1);
    const broken = { ...red, name: "broken.png", buffer: red.buffer.subarray(0, 30) };
    const bitmap = { name: "x.bmp", mimeType: "image/bmp", buffer: red.buffer };
    for (const [file, notice] of [
      [{ ...red, name: "large.png", buffer: large }, /large\.png has more than 20 MiB/],
      [bitmap, /x\.bmp is not a PNG, JPEG, WebP or GIF image/],
      [broken, /broken\.png cannot be shown, so it is left out/],
    ]) {
      await page.setInputFiles("#image-file", [red, file]);
      await says(page, notice);
      await showsImages(page, "#images", 1);
      await page.click('[aria-label="Remove red.png"]');
    }
    // A file that is removed from the disk is still sent.
    const folder = await mkdtemp(join(tmpdir(), "samite-page-"));
    await writeFile(join(folder, "red.png"), red.buffer);
    await page.setInputFiles("#image-file", join(folder, "red.png"));
    await showsImages(page, "#images", 1);
    await page.waitForTimeout(500);
    await rm(folder, { recursive: true });
    await ask(page, "What is this?");
    assert.deepEqual(page.asked.pop().messages[0].content[0], partOf(red));
    // SVG is text.
    const drawing = { name: "a.svg", mimeType: "image/svg+xml", buffer: Buffer.from("<svg/>") };
    await page.setInputFiles("#file", drawing);
    await page.waitForSelector("#files .chip");
    assert.equal(await thumbnails(page, "#images").count(), 0);
    // Images wait where another model has been chosen that does not see them.
    await page.setInputFiles("#image-file", red);
    await page.unroute("**/props*");
    await set(page, {});
    await page.waitForSelector("#add-image", { state: "hidden" });
    await page.fill("#text", "What is this?");
    await page.keyboard.press("Enter");
    assert.match(await status(page), /does not see images/);
    assert.equal(page.asked.length, 0);
    assert.equal(await thumbnails(page, "#images").count(), 1);
    return page;
  },

  async "images for which the browser has no room are sent, and a notice stays"() {
    const page = await sighted();
    const client = await page.context().newCDPSession(page);
    const { origin } = new URL(url);
    const limit = (values) =>
      client.send("Storage.overrideQuotaForOrigin", { origin, ...values });
    // The conversation fits, its image does not.
    await limit({ quotaSize: 1 << 20 });
    const large = { ...gif, buffer: Buffer.concat([gif.buffer, Buffer.alloc(4 << 20)]) };
    await page.setInputFiles("#image-file", large);
    await ask(page, "What is this?");
    const sent = page.asked[0].messages[0].content[0].image_url.url;
    assert.equal(sent, `data:image/gif;base64,${large.buffer.toString("base64")}`);
    await says(page, /has no room for the images: .* gone/);
    await showsImages(page, ".message.user", 1);
    assert.equal(await storedImages(page), 0);
    // It is stored as soon as there is room.
    await limit({});
    await page.click("text=Regenerate");
    await idle(page);
    await says(page, /^$/);
    assert.equal(await storedImages(page), 1);
    return page;
  },

  async "Markdown becomes elements, and never HTML"() {
    const page = await opened();
    const html = (text) => page.evaluate(async (text) => {
      const { blocks } = await import(new URL("markdown.js", location));
      const box = document.createElement("div");
      box.append(...blocks(text));
      return box.innerHTML
        .replaceAll(/ (class|tabindex|type|data-copy|aria-label|target|rel|style|data-display)="[^"]*"/g, "")
        .replaceAll("<button>Copy</button>", "")
        .replaceAll(/(?<=>)\n|\n(?=<)/g, "");
    }, text);
    for (const [text, expected] of [
      ["Hello *you* and **all** of `it`", "<p>Hello <em>you</em> and <strong>all</strong> of <code>it</code></p>"],
      ["# A\n## B #\ntext", "<h2>A</h2><h3>B</h3><p>text</p>"],
      ["- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"],
      ["3. a\n4. b\n\nc", '<ol start="3"><li>a</li><li>b</li></ol><p>c</p>'],
      ["```js\na < b && `c`\n```\nd", '<div><pre><code data-language="js">a &lt; b &amp;&amp; <span>`c`</span></code></pre></div><p>d</p>'],
      ["```nope\n<b>\n```", '<div><pre><code data-language="nope">&lt;b&gt;</code></pre></div>'],
      ["~~~\nnot ended", "<div><pre><code>not ended</code></pre></div>"],
      ["| a | b |\n|---|:-:|\n| 1 | x\\|y |", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>x|y</td></tr></tbody></table>"],
      ["> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"],
      ["a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"],
      ["[x](https://a.b/c_(d)) [y](javascript:alert(1)) https://e.f", '<p><a href="https://a.b/c_(d)">x</a> [y](javascript:alert(1)) <a href="https://e.f">https://e.f</a></p>'],
      ["<img src=x onerror=alert(1)> <script>1</script>", "<p>&lt;img src=x onerror=alert(1)&gt; &lt;script&gt;1&lt;/script&gt;</p>"],
      ["snake_case_name 2 * 3 * 4 \\*no\\*", "<p>snake_case_name 2 * 3 * 4 *no*</p>"],
      ["![alt](https://a.b/c.png) ![](data:image/png;base64,AA)", '<p><a href="https://a.b/c.png">alt</a> ![](data:image/png;base64,AA)</p>'],
      ["[![built](https://a.b/c.svg)](https://d.e)", '<p><a href="https://d.e">built</a></p>'],
      ["$$x\\tag{1}\\label{files}$$ \\(\\ref{file}\\)", null],
      ["~~gone~~ a  \nb", "<p><s>gone</s> a<br>b</p>"],
      ["one\ntwo", "<p>one<br>two</p>"],
      ["see https://a.b/c. Or https://d.e!", '<p>see <a href="https://a.b/c">https://a.b/c</a>. Or <a href="https://d.e">https://d.e</a>!</p>'],
      ["\\(a_1\\) costs $5 or $6, $x$", "<p><span><math><msub><mi>a</mi><mn>1</mn></msub></math></span> costs $5 or $6, <span><math><mi>x</mi></math></span></p>"],
      ["\\[\\frac{1}{2}\\]", '<p><math display="block"><mfrac><mn>1</mn><mn>2</mn></mfrac></math></p>'],
      ["$$\na\n\n= b\n$$\nrest", '<p><math display="block"><mrow><mi>a</mi><mo>=</mo><mi>b</mi></mrow></math></p><p>rest</p>'],
      ["\\(\\nope{\\) `$a$`", "<p><span><code>\\nope{</code></span> <code>$a$</code></p>"],
    ]) {
      const found = await html(text);
      if (expected === null) assert.doesNotMatch(found, / id=| href=/, found);
      else assert.equal(found, expected, text);
    }
    // What is shown piece by piece is the same as the whole.
    const differing = await page.evaluate(async (texts) => {
      const { blocks, Growing } = await import(new URL("markdown.js", location));
      return texts.filter((text) => {
        const [grown, whole] = [document.createElement("div"), document.createElement("div")];
        const growing = new Growing(grown);
        for (let end = 0; end <= text.length; end += 1) growing.show(text.slice(0, end));
        whole.append(...blocks(text));
        return grown.innerHTML.replaceAll("\n", "") !== whole.innerHTML.replaceAll("\n", "");
      });
    }, [
      "# A\n\none\ntwo\n\n- a\n- b\n\n  c\n\n```js\n\nx\n\n```\n\n$$\na\n\n= b\n$$\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> q\n\nend",
      "one\r\n\r\ntwo\r\n\r\n1. a\r\n2. b\r\n\r\nend",
    ]);
    assert.deepEqual(differing, []);
    // Of a text that grows, what is finished stays.
    const isKept = await page.evaluate(async () => {
      const { Growing } = await import(new URL("markdown.js", location));
      const box = document.createElement("div");
      const growing = new Growing(box);
      growing.show("one\n\ntwo\n\nthree");
      const first = box.firstChild;
      growing.show("one\n\ntwo\n\nthree and four");
      return first === box.firstChild && box.lastElementChild.textContent === "three and four";
    });
    assert.ok(isKept);
    // Text that could make a parser go round in circles.
    for (const text of [
      "*".repeat(20000), "**a".repeat(5000), "[".repeat(20000), "`".repeat(9999) + "a", "x" + "`".repeat(2000) + "a".repeat(5000), "> ".repeat(3000),
      "- ".repeat(3000), "_a".repeat(9000), "#" + " ".repeat(2500) + "\u2028", "$a ".repeat(8000), "\\(".repeat(10000), "\\[\n".repeat(5000),
      "|a".repeat(9000) + "\n" + "|-".repeat(9000), "\\(" + "{".repeat(4000) + "\\)",
    ]) {
      const start = Date.now();
      await html(text);
      assert.ok(Date.now() - start < 3000, `${text.slice(0, 10)}: ${Date.now() - start} ms`);
    }
    return page;
  },

  async "errors of the server are shown, and the conversation goes on"() {
    const page = await opened();
    await set(page, { max_tokens: "4" });
    await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 503, json: { error: { message: "too many requests wait" } } }));
    await ask(page, "Hello");
    assert.match(await page.locator(".message .error").innerText(), /too many requests wait/);
    await page.unroute("**/v1/chat/completions");
    await page.click("text=Regenerate");
    await page.waitForTimeout(100);
    await idle(page);
    assert.equal(await page.locator(".message .error").count(), 0);
    // Chromium tells of the status that was asked for.
    page.wrong = page.wrong.filter((error) => !error.includes("503"));
    return page;
  },

  async "the machine is shown"() {
    const page = await opened();
    await page.click("#machine-open");
    await page.waitForSelector("#machine table");
    const shown = await page.locator("#machine-body").innerText();
    for (const word of ["Slots", "Plan of a token", "Memory", "cpu", "operations"]) assert.ok(shown.includes(word), `${word}: ${shown}`);
    await picture(page, "machine");
    await page.click("#machine-close");
    return page;
  },

  async "one of several models is chosen"() {
    const stories = fileURLToPath(new URL("../../../models/stories/stories.gguf", import.meta.url));
    const folder = await mkdtemp(join(tmpdir(), "samite-page-"));
    for (const name of ["first", "second"]) await copyFile(stories, join(folder, `${name}.gguf`));
    const several = await started("--models-dir", folder, "-c", "512", "--models-max", "1");
    try {
      const page = await opened({}, several.url);
      await page.waitForSelector("#which:not([hidden])");
      assert.deepEqual(await page.locator("#which option").allInnerTexts(), ["first", "second"]);
      await set(page, { max_tokens: "4", temperature: "0" });
      for (const name of ["second", "first"]) {
        await page.selectOption("#which", name);
        await page.waitForFunction((name) => document.title.startsWith(name), name);
        await dispatch(page, "paste", [gif]);
        assert.match(await status(page), /is not loaded/);
        const sent = page.waitForRequest("**/v1/chat/completions");
        await page.click("#new");
        await ask(page, "Once upon a time");
        assert.equal((await sent).postDataJSON().model, name);
        assert.ok((await answers(page).innerText()).length > 4);
        // The page learns what the model sees when its first answer has loaded it.
        for (let tries = 0; !/does not see images/.test(await status(page)); tries += 1) {
          assert.ok(tries < 100, await status(page));
          await dispatch(page, "paste", [gif]);
          await page.waitForTimeout(50);
        }
        // It has been loaded, and the other one has made room.
        const { data } = await page.evaluate(async () => (await fetch(new URL("v1/models", location))).json());
        assert.deepEqual(data.map((model) => [model.id, model.status.value]), ["first", "second"].map((id) => [id, id === name ? "loaded" : "unloaded"]));
      }
      await page.click("#machine-open");
      await page.waitForSelector("#machine table");
      await page.click("#machine-close");
      await picture(page, "several");
      // Nothing is known of a model that is not loaded, which Chromium tells of.
      page.wrong = page.wrong.filter((error) => !error.includes("400"));
      return page;
    } finally {
      several.server.kill();
      await rm(folder, { recursive: true });
    }
  },

  async "a telephone in the dark"() {
    const page = await opened({ viewport: { width: 360, height: 640 }, colorScheme: "dark" });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 360);
    await set(page, { max_tokens: "30" });
    await ask(page, "Once upon a time");
    await picture(page, "telephone");
    const sees = await sighted({ viewport: { width: 360, height: 640 }, colorScheme: "dark" });
    const colours = ["red", "green", "blue", "gray"].map((colour) => [colour, "png"]);
    const files = await imageFiles(sees, ...colours);
    await sees.setInputFiles("#image-file", files);
    await showsImages(sees, "#images", 4);
    await ask(sees, "What is this?");
    await sees.setInputFiles("#image-file", files);
    await showsImages(sees, "#images", 4);
    assert.equal(await sees.evaluate(() => document.documentElement.scrollWidth), 360);
    assert.equal(await sees.locator("#send").isVisible(), true);
    await picture(sees, "telephone-images");
    await sees.click('.message [aria-label="Enlarge gray.png"]');
    await picture(sees, "telephone-image");
    await sees.click("#image button");
    assert.deepEqual(await sees.evaluate(nameless), []);
    assert.deepEqual(sees.wrong, []);
    await sees.context().close();
    await page.click("#menu");
    await page.waitForSelector("#list .open");
    assert.equal(await page.getAttribute("#menu", "aria-expanded"), "true");
    await picture(page, "telephone-menu");
    await page.click("#list .open");
    assert.equal(await page.locator("#side").isVisible(), false);
    return page;
  },

  async "it is used without a mouse, and every control has a name"() {
    const page = await opened();
    assert.deepEqual(await page.evaluate(nameless), []);
    await set(page, { max_tokens: "4" });
    // A dialog tells that it was closed a little later.
    await page.waitForFunction(() => document.activeElement.id === "text");
    await page.keyboard.type("One day");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("Tom");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".message.assistant");
    await idle(page);
    assert.equal(await page.locator(".message.user .body").innerText(), "One day\nTom");
    await page.keyboard.press("ArrowUp");
    await page.waitForSelector(".message textarea");
    await page.keyboard.press("Escape");
    await page.keyboard.press("Control+Shift+O");
    await page.waitForSelector(".hint");
    return page;
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    const page = await test();
    assert.deepEqual(page.wrong, []);
    await page.context().close();
    console.log(`ok: ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED: ${name}: ${error.stack}`);
  }
}
await browser.close();
server.kill();
process.exit(failed ? 1 : 0);
