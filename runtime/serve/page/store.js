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
  const transaction = (await database).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  // Without it, a reload right after a change loses the change.
  transaction.commit();
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** All conversations, the latest first. */
export async function all() {
  const found = await on("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.changed - a.changed);
}

export const put = (conversation) => on("readwrite", (store) => store.put(conversation));
export const remove = (id) => on("readwrite", (store) => store.delete(id));
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
