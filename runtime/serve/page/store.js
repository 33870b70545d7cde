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

// The browser aborts the writes of a page that is left. They are copied to localStorage, which is synchronous, and the next
// page writes them again.
const UNSAVED = "samite.unsaved";

/** Conversations that are being written, by id; null for one that is being deleted. */
const unsaved = new Map();

/** What earlier pages did not save, as pairs of ids and conversations. */
function left() {
  try {
    return JSON.parse(localStorage.getItem(UNSAVED)) ?? [];
  } catch {
    return [];
  }
}

addEventListener("pagehide", () => {
  if (!unsaved.size) return;
  try {
    localStorage.setItem(UNSAVED, JSON.stringify([...new Map([...left(), ...unsaved])]));
  } catch {
    // Large files do not fit.
  }
});

async function write(id, conversation) {
  unsaved.set(id, conversation);
  try {
    await on("readwrite", (store) => (conversation ? store.put(conversation) : store.delete(id)));
  } finally {
    if (unsaved.get(id) === conversation) unsaved.delete(id);
  }
}

/** Writes what earlier pages did not save, unless another page has saved something newer. */
async function restore() {
  for (const [id, conversation] of left()) {
    const stored = await on("readonly", (store) => store.get(id));
    if (!conversation || !stored || stored.changed <= conversation.changed) await write(id, conversation);
  }
  localStorage.removeItem(UNSAVED);
}

/** All conversations, the latest first. */
export async function all() {
  await restore().catch(() => {});
  const found = await on("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.changed - a.changed);
}

export const put = (conversation) => write(conversation.id, conversation);
export const remove = (id) => write(id, null);

export function clear() {
  unsaved.clear();
  localStorage.removeItem(UNSAVED);
  return on("readwrite", (store) => store.clear());
}

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
