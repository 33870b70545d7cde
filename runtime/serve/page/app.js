// The page: conversations, their messages, and the box for the next one.

import * as store from "./store.js";
import { answer, get, ofModel } from "./client.js";
import { button, element } from "./dom.js";
import * as images from "./images.js";
import { Growing, blocks } from "./markdown.js";
import { open as openMachine } from "./machine.js";

const find = (id) => document.getElementById(id);
const [side, list, log, text, status, send, composer] = ["side", "list", "log", "text", "status", "send", "composer"].map(find);

let conversations = [];
let current = fresh();
/** Answers that are being written, by conversation: the article and what ends it. */
const coming = new Map();
/** On a touch screen, Enter begins a new line, and only the button sends. */
const isTouch = matchMedia("(pointer: coarse)").matches;
/** Files that go with the next message. */
let files = [];
/** Images that go with the next message. */
let pending = [];
let isStories = false;
/** True if the model sees images; `undefined` while that is not known. */
let hasVision;

/** The largest file that is taken as context. */
const MOST_BYTES = 1 << 20;

function fresh() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
  return { id, title: "", changed: Date.now(), messages: [] };
}

function say(message, isError = false) {
  status.textContent = message;
  status.className = isError ? "error" : "quiet";
}

// Conversations.

async function keep(conversation = current) {
  if (!conversation.messages.length) return;
  conversation.changed = Date.now();
  const first = conversation.messages[0];
  const [attached] = [...(first.files ?? []), ...(first.images ?? [])];
  const title = first.content.trim() || attached?.name || "Untitled";
  conversation.title ||= title.replace(/\s+/g, " ").slice(0, 80);
  if (!conversations.includes(conversation)) conversations.push(conversation);
  try {
    await store.put(structuredClone(conversation));
  } catch {
    say("This browser keeps no conversations: they are gone when the page is closed.");
  }
  // It may have been deleted meanwhile.
  if (!conversations.includes(conversation)) return;
  await images.save(conversation.id).catch(({ name }) => {
    const reason = name === "QuotaExceededError" ? "has no room for" : "does not store";
    say(`This browser ${reason} the images: they are gone when the page is closed.`, true);
  });
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
  stop(conversation);
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation.id).catch(() => {});
  if (conversation === current) choose(fresh());
  else showList();
}

/** Shows another conversation. An answer to the one before goes on. */
function choose(conversation) {
  current = conversation;
  images.forgetPictures();
  setRunning();
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
  const { article } = coming.get(current) ?? {};
  if (article) log.lastChild.replaceWith(article);
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
    if (message.images?.length) article.append(images.thumbnails(message.images));
    body.textContent = message.content;
    if (message.content || !message.images?.length) article.append(body);
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
  const fork = current.forks?.[index];
  if (fork) made.append(...versions(fork, index));
  if (message.stats) made.append(element("span", { class: "stats", title: message.stats.why ?? "" }, message.stats.text));
  return made;
}

/** Buttons that lead to the other versions of a message. */
function versions(fork, index) {
  const count = Math.max(fork.tails.length, fork.at + 1);
  const to = (at, label, name) => {
    const made = button(label, () => show(index, at), { "aria-label": name });
    made.disabled = at < 0 || at >= count;
    return made;
  };
  const text = element("span", { class: "stats" }, `${fork.at + 1} / ${count}`);
  return [to(fork.at - 1, "‹", "Previous version"), text, to(fork.at + 1, "›", "Next version")];
}

/** Takes the messages from `index` on out of the conversation, with their versions. */
function takeTail(index) {
  const tail = { messages: current.messages.splice(index), forks: {} };
  for (const [place, fork] of Object.entries(current.forks ?? {})) {
    if (Number(place) <= index) continue;
    tail.forks[place] = fork;
    delete current.forks[place];
  }
  return tail;
}

/** Puts the version at which a fork is behind the messages of its conversation. */
function putTail(conversation, fork) {
  const { messages, forks } = fork.tails[fork.at];
  conversation.messages.push(...messages);
  Object.assign(conversation.forks, forks);
}

/** Keeps the messages from `index` on as a version. Another one begins there. */
function branch(index) {
  stop();
  const forks = (current.forks ??= {});
  const fork = (forks[index] ??= { tails: [], at: 0 });
  fork.tails[fork.at] = takeTail(index);
  fork.at = fork.tails.length;
}

/** Shows another version of the messages from `index` on. */
function show(index, at) {
  stop();
  const fork = current.forks[index];
  fork.tails[fork.at] = takeTail(index);
  fork.at = at;
  putTail(current, fork);
  keep();
  showLog();
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
  const message = current.messages[index];
  const box = element("textarea", { "aria-label": "Edit the message", rows: "3" });
  box.value = message.content;
  const kept = [...(message.images ?? [])];
  const place = element("div");
  const save = () => {
    branch(index);
    current.messages.push({ ...message, content: box.value, images: kept });
    showLog();
    respond();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      // It ends the edit, not an answer.
      event.stopPropagation();
      showLog();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch) {
      event.preventDefault();
      save();
    }
  });
  const article = log.children[index];
  showImages(place, kept, box);
  const tools = element("div", { class: "tools" }, button("Send", save), button("Cancel", showLog));
  article.replaceChildren(place, box, tools);
  box.focus();
}

function regenerate(index) {
  branch(index);
  showLog();
  respond();
}

// Asking.

function ask() {
  const content = text.value;
  if (coming.has(current) || (!content.trim() && !files.length && !pending.length)) return;
  if (pending.length && !hasVision) return refuseImages();
  const added = images.add(current.id, pending);
  current.messages.push({ role: "user", content, files, images: added });
  files = [];
  pending = [];
  text.value = "";
  showFiles();
  fit();
  showLog();
  respond();
}

function stop(conversation = current) {
  const answer = coming.get(conversation);
  coming.delete(conversation);
  answer?.end.abort();
}

/** What the server is asked. Images are still ids. */
function request() {
  const settings = store.settings();
  const messages = current.messages.map((message) => {
    if (message.role !== "user") return { role: "assistant", content: message.content };
    const parts = (message.files ?? []).map((file) => `File ${file.name}:\n\n${file.text}\n\n`);
    const text = parts.join("") + message.content;
    if (!message.images?.length) return { role: "user", content: text };
    const seen = message.images.map(({ id }) => ({ type: "image_url", image_url: { url: id } }));
    return { role: "user", content: text ? [...seen, { type: "text", text }] : seen };
  });
  if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { messages, return_progress: true };
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
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "" };
  const body = element("div", { class: "body is-coming" });
  const article = element("article", { class: "message assistant", "aria-busy": "true" }, element("p", { class: "who" }, "Answer"), body);
  conversation.messages.push(message);
  coming.set(conversation, { article, end: own });
  setRunning();
  log.append(article);
  const tell = (text) => conversation === current && say(text);
  const growing = new Growing(body);
  let details = null;
  let last = {};
  let isDrawn = true;
  let drawing = 0;
  const draw = () => {
    const start = performance.now();
    isDrawn = true;
    const isBelow = conversation === current && log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (message.reasoning) {
      if (!details) article.insertBefore((details = thoughts("", true)), body);
      details.lastChild.textContent = message.reasoning;
      if (message.content) details.open = false;
    }
    growing.show(message.content);
    if (isBelow) log.scrollTop = log.scrollHeight;
    drawing = performance.now() - start;
  };
  draw();
  log.scrollTop = log.scrollHeight;
  tell("Prefill …");
  let first = 0;
  let count = 0;
  await keep();
  // Saves the partial answer, so that a reload keeps it.
  const saving = setInterval(() => store.put(structuredClone(conversation)).catch(() => {}), 1000);
  try {
    for await (const chunk of answer(await images.embed(asked), own.signal)) {
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
      const { prompt_progress: progress } = chunk;
      if (progress && !first) tell(`Prefill: ${progress.processed} of ${progress.total} tokens`);
      if (isDrawn) {
        isDrawn = false;
        // Long answers take a while to draw: most of the time is left to others.
        setTimeout(draw, Math.max(40, 4 * drawing));
      }
      if (first) tell(`${(count / Math.max((performance.now() - first) / 1000, 0.05)).toFixed(1)} tokens/s`);
    }
    message.stats = stats(last);
    tell(last.reason === "length" ? "The answer was cut off: raise \"Most tokens\" in the settings, or the server's context." : "");
  } catch (error) {
    if (own.signal.aborted) {
      tell("Stopped.");
    } else {
      message.error = error.message;
      tell("");
      if (error.status === 401) openSettings("key");
    }
  }
  clearInterval(saving);
  draw();
  if (coming.get(conversation)?.end === own) coming.delete(conversation);
  setRunning();
  const isEmpty = !message.content && !message.reasoning && !message.error;
  if (isEmpty && conversation.messages.at(-1) === message) {
    const index = conversation.messages.length - 1;
    const fork = conversation.forks?.[index];
    conversation.messages.pop();
    // The version before comes back in the place of nothing.
    if (fork?.at) {
      fork.at -= 1;
      putTail(conversation, fork);
    }
  }
  // The answer has loaded the model.
  if (hasVision === undefined) begin();
  if (!conversations.includes(conversation)) return;
  await keep(conversation);
  // A message that is being edited stays as it is.
  if (conversation === current && !log.querySelector("textarea")) showLog();
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

function setRunning() {
  send.textContent = coming.has(current) ? "Stop" : "Send";
}

// The box.

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (coming.has(current)) stop();
  else ask();
});
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && !isTouch) {
    event.preventDefault();
    ask();
  } else if (event.key === "ArrowUp" && !text.value && !coming.has(current)) {
    const index = current.messages.findLastIndex((message) => message.role === "user");
    if (index >= 0) edit(index);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && coming.has(current) && !document.querySelector("dialog[open]")) stop();
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
  showImages(find("images"), pending, text);
}

/** Shows images that can still be removed from a message, whose text is in `box`. */
function showImages(place, own, box) {
  const takeOut = (image) => {
    const at = own.indexOf(image);
    if (at >= 0) own.splice(at, 1);
    showImages(place, own, box);
    return at;
  };
  const remove = (image) => {
    const at = takeOut(image);
    // The button that had the focus is gone.
    (place.querySelectorAll('[aria-label^="Remove"]')[at] ?? box).focus();
    say(`Removed ${image.name}.`);
  };
  const reject = (image) => {
    takeOut(image);
    say(`${image.name} cannot be shown, so it is left out.`, true);
  };
  place.replaceChildren(...(own.length ? [images.thumbnails(own, remove, reject)] : []));
}

function refuseImages() {
  const blind = "This model does not see images: the server's flag --mmproj gives it an encoder.";
  const unloaded = "The model is not loaded: send a message without images first.";
  say(hasVision === false ? blind : unloaded, true);
}

function takeImages(given) {
  if (!given.length) return;
  if (!hasVision) return refuseImages();
  const refusals = given.map(images.refusal);
  const accepted = given.filter((_, at) => !refusals[at]);
  for (const file of accepted) {
    const image = { name: file.name, blob: file };
    pending.push(image);
    // A file may change before the message is sent.
    const copied = file.arrayBuffer();
    copied.then((bytes) => (image.blob = new Blob([bytes], { type: file.type })), () => {});
  }
  showFiles();
  const refused = refusals.filter(Boolean).join(" ");
  say(refused || `Added ${accepted.map(({ name }) => name).join(", ")}.`, Boolean(refused));
}

async function take(given) {
  takeImages(given.filter(images.isImage));
  for (const file of given.filter((file) => !images.isImage(file))) {
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

for (const [name, input] of [["attach", "file"], ["add-image", "image-file"]]) {
  find(name).addEventListener("click", () => find(input).click());
  find(input).addEventListener("change", ({ target }) => {
    take([...target.files]);
    target.value = "";
  });
}
const hasDialog = () => document.querySelector("dialog[open]");
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  // Spreadsheets copy cells as text and as an image.
  const isText = types.includes("text/plain") && types.includes("text/html");
  if (!files.length || isText || hasDialog()) return;
  event.preventDefault();
  take([...files]);
});
document.addEventListener("dragover", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  composer.classList.toggle("is-dropping", !hasDialog());
});
document.addEventListener("dragleave", (event) => {
  // Only a pointer that leaves the page enters no other element.
  if (!event.relatedTarget) composer.classList.remove("is-dropping");
});
document.addEventListener("drop", (event) => {
  composer.classList.remove("is-dropping");
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  if (!hasDialog()) take([...event.dataTransfer.files]);
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
  // Without a conversation in the list, an answer that ends now does not save it again.
  conversations = [];
  for (const conversation of [...coming.keys()]) stop(conversation);
  await store.clear().catch(() => {});
  dialog.close();
  choose(fresh());
});

find("settings-open").addEventListener("click", () => openSettings());
find("machine-open").addEventListener("click", openMachine);
find("new").addEventListener("click", () => choose(fresh()));
find("menu").addEventListener("click", () => toggleSide(!side.classList.contains("is-open")));
find("log").addEventListener("click", () => toggleSide(false));
find("export").addEventListener("click", async () => {
  const { id, title } = current;
  const whole = { ...current, images: await images.dataUrls(id) };
  const content = JSON.stringify(whole, null, 2);
  const href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  const link = element("a", { href, download: `${title || "conversation"}.json` });
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
    const chosen = which.value;
    const props = await get(`props${ofModel()}`).catch((error) => {
      // Of a model that is not loaded, only the name is known.
      if (error.status === 400 && chosen) return { model_alias: chosen, is_unloaded: true };
      throw error;
    });
    // Another model has been chosen meanwhile.
    if (which.value !== chosen) return;
    hasVision = props.is_unloaded ? undefined : props.modalities?.vision === true;
    find("add-image").hidden = !hasVision;
    const name = props.model_alias || props.model_path || "samite";
    find("model").textContent = name;
    document.title = `${name} · samite`;
    isStories = Boolean(props.is_embedded);
    const defaults = props.default_generation_settings?.params ?? {};
    for (const field of form.elements) {
      const value = defaults[field.name];
      if (typeof value === "number") field.placeholder = String(Math.round(value * 1e4) / 1e4);
    }
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
