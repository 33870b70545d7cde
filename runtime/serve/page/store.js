// Conversations and their images in the browser's own databases; settings beside them. The key of
// the server is kept until the tab is closed.

function opened(name, store, options) {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(store, options);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Returns a function that acts on the only store of a database. */
function database(name, store, options) {
  let opening = null;
  return async (mode, act) => {
    opening ??= opened(name, store, options);
    const transaction = (await opening).transaction(store, mode);
    const request = act(transaction.objectStore(store));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      // A full disk aborts a transaction whose request has succeeded.
      transaction.onabort = () => reject(transaction.error);
    });
  };
}

const on = database("samite", "conversations", { keyPath: "id" });
// Images have a database of their own, so that older pages can still open the first one.
const onImages = database("samite-images", "images");

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
    if (!conversation) await onImages("readwrite", (store) => store.delete(imagesOf(id)));
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

export async function clear() {
  unsaved.clear();
  localStorage.removeItem(UNSAVED);
  for (const each of [on, onImages]) await each("readwrite", (store) => store.clear());
}

// Ids of images begin with their conversation's, so one range of keys has all of them.
const imagesOf = (conversation) => IDBKeyRange.bound(`${conversation}/`, `${conversation}/\uffff`);
const random = () => Math.random().toString(36).slice(2);
export const imageId = (conversation) => `${conversation}/${random()}${random()}`;
export const isImageOf = (id, conversation) => id.startsWith(`${conversation}/`);

export const putImage = (id, blob) => onImages("readwrite", (store) => store.put(blob, id));
export const image = (id) => onImages("readonly", (store) => store.get(id));

/** Returns the images of a conversation, as pairs of ids and blobs. */
export async function images(conversation) {
  const range = imagesOf(conversation);
  const keys = await onImages("readonly", (store) => store.getAllKeys(range));
  const blobs = await onImages("readonly", (store) => store.getAll(range));
  return keys.map((key, at) => [key, blobs[at]]);
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
