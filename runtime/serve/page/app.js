// The page: conversations, their messages, and the box for the next one.

import * as store from "./store.js";
import { answer, get, ofModel } from "./client.js";
import { blocks } from "./markdown.js";
import { open as openMachine } from "./machine.js";

const find = (id) => document.getElementById(id);
const [side, list, log, text, status, send, composer] = ["side", "list", "log", "text", "status", "send", "composer"].map(find);

let conversations = [];
let current = fresh();
/** The answer that is coming. */
let running = null;
/** Files that go with the next message. */
let files = [];
let isStories = false;

/** The largest file that is taken as context. */
const MOST_BYTES = 1 << 20;

function fresh() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
  return { id, title: "", changed: Date.now(), messages: [] };
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function button(label, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", act);
  return made;
}

function say(message, isError = false) {
  status.textContent = message;
  status.className = isError ? "error" : "quiet";
}

// Conversations.

async function keep() {
  if (!current.messages.length) return;
  current.changed = Date.now();
  const first = current.messages[0];
  current.title ||= (first.content.trim() || first.files?.[0]?.name || "Untitled").replace(/\s+/g, " ").slice(0, 80);
  if (!conversations.includes(current)) conversations.push(current);
  try {
    await store.put(structuredClone(current));
  } catch {
    say("This browser keeps no conversations: they are gone when the page is closed.");
  }
  showList();
}

function showList() {
  conversations.sort((a, b) => b.changed - a.changed);
  list.replaceChildren(
    ...conversations.map((conversation) => {
      const open = button(conversation.title || "Untitled", () => choose(conversation), { class: "open", title: conversation.title });
      if (conversation === current) open.setAttribute("aria-current", "true");
      const drop = button("✕", () => dropConversation(conversation), { class: "drop", "aria-label": `Delete ${conversation.title}` });
      return element("li", {}, open, drop);
    }),
  );
}

async function dropConversation(conversation) {
  if (!confirm(`Delete "${conversation.title}"?`)) return;
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation.id).catch(() => {});
  if (conversation === current) choose(fresh());
  else showList();
}

function choose(conversation) {
  stop();
  current = conversation;
  toggleSide(false);
  say("");
  showList();
  showLog();
  text.focus();
}

function toggleSide(isOpen) {
  side.classList.toggle("is-open", isOpen);
  find("menu").setAttribute("aria-expanded", String(isOpen));
}

// Messages.

function showLog() {
  if (!current.messages.length) log.replaceChildren(welcome());
  else log.replaceChildren(...current.messages.map((message, index) => shown(message, index)));
  log.scrollTop = log.scrollHeight;
}

function welcome() {
  const ideas = isStories
    ? ["Once upon a time, there was a little robot", "One day, Lily found a map"]
    : ["Explain how a transformer predicts the next word.", "Write a short poem about weaving.", "What can go wrong when floating-point numbers are summed?"];
  const hint = isStories ? "This small model only tells stories. Begin one:" : "Write a message below, or try one of these:";
  const use = (idea) => button(idea, () => { text.value = idea; fit(); ask(); });
  return element("div", { class: "hint" }, element("p", {}, hint), ...ideas.map(use));
}

/** A message as an article of the log. */
function shown(message, index) {
  const isUser = message.role === "user";
  const body = element("div", { class: "body" });
  const article = element("article", { class: `message ${message.role}` }, element("p", { class: "who" }, isUser ? "You" : "Answer"));
  if (isUser) {
    for (const file of message.files ?? []) article.append(element("span", { class: "chip" }, file.name));
    body.textContent = message.content;
    article.append(body);
  } else {
    if (message.reasoning) article.append(thoughts(message.reasoning, false));
    body.append(...blocks(message.content));
    article.append(body);
    if (message.error) article.append(element("p", { class: "error", role: "alert" }, message.error));
  }
  article.append(tools(message, index));
  return article;
}

function thoughts(content, isOpen) {
  const made = element("details", {}, element("summary", {}, "Thoughts"), element("pre", {}, content));
  made.open = isOpen;
  return made;
}

function tools(message, index) {
  const isUser = message.role === "user";
  const made = element("div", { class: "tools" }, button("Copy", (event) => copy(message.content, event.target)));
  if (isUser) made.append(button("Edit", () => edit(index)));
  else if (index === current.messages.length - 1) made.append(button("Regenerate", () => regenerate(index)));
  if (message.stats) made.append(element("span", { class: "stats", title: message.stats.why ?? "" }, message.stats.text));
  return made;
}

async function copy(content, target) {
  try {
    await navigator.clipboard.writeText(content);
  } catch {
    // Pages without encryption have no clipboard of their own.
    const box = element("textarea", { readonly: "" });
    box.value = content;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const before = target.textContent;
  target.textContent = "Copied";
  setTimeout(() => (target.textContent = before), 1200);
}

log.addEventListener("click", (event) => {
  const target = event.target.closest("[data-copy]");
  if (target) copy(target.parentElement.querySelector("code").textContent, target);
});

function edit(index) {
  stop();
  const message = current.messages[index];
  const box = element("textarea", { "aria-label": "Edit the message", rows: "3" });
  box.value = message.content;
  const save = () => {
    current.messages.length = index + 1;
    message.content = box.value;
    showLog();
    respond();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showLog();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      save();
    }
  });
  const article = log.children[index];
  article.replaceChildren(box, element("div", { class: "tools" }, button("Send", save), button("Cancel", showLog)));
  box.focus();
}

function regenerate(index) {
  stop();
  current.messages.length = index;
  showLog();
  respond();
}

// Asking.

function ask() {
  const content = text.value;
  if (running || (!content.trim() && !files.length)) return;
  current.messages.push({ role: "user", content, files });
  files = [];
  text.value = "";
  showFiles();
  fit();
  showLog();
  respond();
}

function stop() {
  running?.abort();
}

/** What the server is asked. */
function request() {
  const settings = store.settings();
  const messages = current.messages.map((message) => {
    if (message.role !== "user") return { role: "assistant", content: message.content };
    const parts = (message.files ?? []).map((file) => `File ${file.name}:\n\n${file.text}\n\n`);
    return { role: "user", content: parts.join("") + message.content };
  });
  if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { messages };
  if (which.value) body.model = which.value;
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed", "max_tokens"]) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.schema?.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  }
  return body;
}

async function respond() {
  const asked = request();
  const own = new AbortController();
  running = own;
  setRunning(true);
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "" };
  const body = element("div", { class: "body is-coming" });
  const article = element("article", { class: "message assistant", "aria-busy": "true" }, element("p", { class: "who" }, "Answer"), body);
  conversation.messages.push(message);
  log.append(article);
  let details = null;
  let last = {};
  let isDrawn = true;
  let drawing = 0;
  const draw = () => {
    const start = performance.now();
    isDrawn = true;
    const isBelow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (message.reasoning) {
      if (!details) article.insertBefore((details = thoughts("", true)), body);
      details.lastChild.textContent = message.reasoning;
      if (message.content) details.open = false;
    }
    body.replaceChildren(...blocks(message.content));
    if (isBelow) log.scrollTop = log.scrollHeight;
    drawing = performance.now() - start;
  };
  draw();
  log.scrollTop = log.scrollHeight;
  say("The model reads …");
  let first = 0;
  let count = 0;
  await keep();
  try {
    for await (const chunk of answer(asked, own.signal)) {
      const delta = chunk.choices?.[0]?.delta ?? {};
      message.content += delta.content ?? "";
      message.reasoning += delta.reasoning_content ?? "";
      if (delta.content || delta.reasoning_content) {
        first ||= performance.now();
        count += 1;
      }
      const { timings, usage, cache_miss: miss } = chunk;
      last = { ...last, ...(timings && { timings }), ...(usage && { usage }), ...(miss && { miss }) };
      if (chunk.choices?.[0]?.finish_reason) last.reason = chunk.choices[0].finish_reason;
      if (isDrawn) {
        isDrawn = false;
        // Long answers take a while to draw: most of the time is left to others.
        setTimeout(draw, Math.max(40, 4 * drawing));
      }
      if (first) say(`${(count / Math.max((performance.now() - first) / 1000, 0.05)).toFixed(1)} tokens/s`);
    }
    message.stats = stats(last);
    say(last.reason === "length" ? "The answer was cut off: raise \"Most tokens\" in the settings, or the server's context." : "");
  } catch (error) {
    if (own.signal.aborted) {
      say("Stopped.");
    } else {
      message.error = error.message;
      say("");
      if (error.status === 401) openSettings("key");
    }
  }
  if (!message.content && !message.reasoning && own.signal.aborted) conversation.messages.pop();
  if (running === own) {
    running = null;
    setRunning(false);
  }
  if (conversation === current) {
    await keep();
    // A message that is being edited stays as it is.
    if (!log.querySelector("textarea")) showLog();
  } else if (conversations.includes(conversation)) {
    await store.put(structuredClone(conversation)).catch(() => {});
  }
}

/** What an answer took, in words. */
function stats({ timings, usage, miss }) {
  const parts = [];
  if (timings) {
    parts.push(`${timings.predicted_n} tokens, ${Number(timings.predicted_per_second ?? 0).toFixed(1)} tokens/s`);
  }
  const known = timings?.cache_n ?? usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`${known ?? 0} of ${usage.prompt_tokens} prompt tokens known`);
  const why = miss ? `Computed from token ${miss.at_token} on: ${miss.cause}` : undefined;
  return { text: parts.join(" · "), why };
}

function setRunning(is) {
  send.textContent = is ? "Stop" : "Send";
}

// The box.

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else ask();
});
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    ask();
  } else if (event.key === "ArrowUp" && !text.value && !running) {
    const index = current.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0) edit(index);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    choose(fresh());
  }
});

function showFiles() {
  find("files").replaceChildren(
    ...files.map((file) => {
      const drop = button("✕", () => { files = files.filter((other) => other !== file); showFiles(); }, { "aria-label": `Leave ${file.name} out` });
      return element("span", { class: "chip" }, file.name, " ", drop);
    }),
  );
}

async function take(given) {
  for (const file of given) {
    if (file.size > MOST_BYTES) {
      say(`${file.name} has more than ${MOST_BYTES >> 20} MiB.`, true);
      continue;
    }
    const content = await file.text();
    if (content.includes("\0")) say(`${file.name} is no text.`, true);
    else files.push({ name: file.name, text: content });
  }
  showFiles();
}

find("attach").addEventListener("click", () => find("file").click());
find("file").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = "";
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  take([...(event.dataTransfer?.files ?? [])]);
});

// Settings.

const dialog = find("settings");
const form = dialog.querySelector("form");

function openSettings(focus) {
  const settings = store.settings();
  for (const field of form.elements) {
    if (field.name) field.value = field.name === "key" ? store.key() : (settings[field.name] ?? "");
  }
  find("schema-error").textContent = "";
  if (!dialog.open) dialog.showModal();
  if (focus) form.elements[focus].focus();
}

form.addEventListener("submit", (event) => {
  const values = Object.fromEntries([...form.elements].filter((field) => field.name).map((field) => [field.name, field.value]));
  try {
    if (values.schema.trim()) JSON.parse(values.schema);
  } catch (error) {
    event.preventDefault();
    find("schema-error").textContent = `The schema is no JSON: ${error.message}`;
    form.elements.schema.focus();
    return;
  }
  store.setKey(values.key);
  delete values.key;
  store.setSettings(values);
  begin();
});
dialog.addEventListener("close", () => text.focus());
find("forget").addEventListener("click", async () => {
  if (!confirm("Delete all conversations in this browser?")) return;
  await store.clear().catch(() => {});
  conversations = [];
  dialog.close();
  choose(fresh());
});

find("settings-open").addEventListener("click", () => openSettings());
find("machine-open").addEventListener("click", openMachine);
find("new").addEventListener("click", () => choose(fresh()));
find("menu").addEventListener("click", () => toggleSide(!side.classList.contains("is-open")));
find("log").addEventListener("click", () => toggleSide(false));
find("export").addEventListener("click", () => {
  const content = JSON.stringify(current, null, 2);
  const link = element("a", { href: URL.createObjectURL(new Blob([content], { type: "application/json" })), download: `${current.title || "conversation"}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

// Where there are several models, one is chosen, also for the page about the machine.

const which = find("which");

async function listModels() {
  const { data } = await get("v1/models");
  if (data.length < 2 || which.options.length) return;
  for (const { id } of data) which.append(element("option", { value: id }, id));
  which.hidden = false;
  find("model").hidden = true;
}

which.addEventListener("change", begin);

// The beginning.

async function begin() {
  try {
    await listModels();
    const props = await get(`props${ofModel()}`).catch((error) => {
      // Of a model that is not loaded, only the name is known.
      if (error.status === 400 && which.value) return { model_alias: which.value };
      throw error;
    });
    const name = props.model_alias || props.model_path || "samite";
    find("model").textContent = name;
    document.title = `${name} · samite`;
    isStories = Boolean(props.is_embedded);
    if (status.classList.contains("error")) say("");
  } catch (error) {
    say(`The server does not answer: ${error.message}`, true);
    if (error.status === 401) openSettings("key");
  }
  if (!current.messages.length) showLog();
}

conversations = await store.all().catch(() => []);
showList();
showLog();
begin();
text.focus();
