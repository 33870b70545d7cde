// Conversations in the browser's own database; settings beside them. The key of the server is kept until the tab is closed.

const STORE = "conversations";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("samite", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

let database = null;

async function on(mode, act) {
  database ??= opened();
  const store = (await database).transaction(STORE, mode).objectStore(STORE);
  const request = act(store);
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// A page that is left aborts its writes. They are kept in storage that is written at once, until the next page makes up for them.
const UNSAVED = "samite.unsaved";

/** Conversations that are being written, by id; null for one that is being deleted. */
const unsaved = new Map();

addEventListener("pagehide", () => {
  if (unsaved.size) localStorage.setItem(UNSAVED, JSON.stringify([...unsaved]));
});

async function write(id, conversation) {
  unsaved.set(id, conversation);
  try {
    await on("readwrite", (store) => (conversation ? store.put(conversation) : store.delete(id)));
  } finally {
    if (unsaved.get(id) === conversation) unsaved.delete(id);
  }
}

/** All conversations, the latest first. */
export async function all() {
  const left = localStorage.getItem(UNSAVED) ?? "[]";
  localStorage.removeItem(UNSAVED);
  for (const [id, conversation] of JSON.parse(left)) await write(id, conversation);
  const found = await on("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.changed - a.changed);
}

export const put = (conversation) => write(conversation.id, conversation);
export const remove = (id) => write(id, null);
export const clear = () => on("readwrite", (store) => store.clear());

/** What is sent with each request. */
export function settings() {
  try {
    return JSON.parse(localStorage.getItem("samite.settings")) ?? {};
  } catch {
    return {};
  }
}

export function setSettings(values) {
  localStorage.setItem("samite.settings", JSON.stringify(values));
}

export const key = () => sessionStorage.getItem("samite.key") ?? "";
export const setKey = (value) => sessionStorage.setItem("samite.key", value);
