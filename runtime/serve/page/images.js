// Images of messages: which files are accepted, thumbnails, and what requests contain.

import { button, element } from "./dom.js";
import * as store from "./store.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
/** Maximum size of an image. */
const MAX_MIB = 20;

const dialog = document.getElementById("image");
/** Blobs that are not in the database yet, by id. */
const unstored = new Map();
/** Elements by image. Drawing the log again moves them, so they do not flicker. */
const pictures = new Map();
export const forgetPictures = () => pictures.clear();

/** Returns whether a file is an image. SVG is text. */
export const isImage = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

/** Returns why `file` is not accepted, if so. */
export function refusal(file) {
  if (!TYPES.includes(file.type)) return `${file.name} is not a PNG, JPEG, WebP or GIF image.`;
  return file.size > MAX_MIB << 20 ? `${file.name} has more than ${MAX_MIB} MiB.` : "";
}

/** Adds images to a conversation, and returns their entries for a message. */
export function add(conversation, images) {
  return images.map(({ name, blob }) => {
    // Not a hash of the content: without TLS, browsers offer none.
    const id = store.imageId(conversation);
    unstored.set(id, blob);
    return { id, name };
  });
}

const unstoredOf = (conversation) =>
  [...unstored].filter(([id]) => store.isImageOf(id, conversation));

/** Stores the images of a conversation that are not in the database yet. */
export async function save(conversation) {
  await Promise.all(unstoredOf(conversation).map(async ([id, blob]) => {
    await store.putImage(id, blob);
    unstored.delete(id);
  }));
}

/** Returns the blob of an image, or `undefined` if the browser has lost it. */
async function blobOf({ id, blob }) {
  return blob ?? unstored.get(id) ?? store.image(id).catch(() => undefined);
}

/** Returns the content of a blob as a data URL. It is empty if the blob cannot be read. */
function dataUrl(blob) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onloadend = () => resolve(reader.result ?? "");
    reader.readAsDataURL(blob);
  });
}

/** Replaces ids of images in a request by their data. Lost images are left out. */
export async function embed(body) {
  const embedPart = async (part) => {
    if (part.type !== "image_url") return part;
    const blob = await blobOf({ id: part.image_url.url });
    const url = blob && (await dataUrl(blob));
    return url && { type: "image_url", image_url: { url } };
  };
  const messages = body.messages.map(async ({ role, content }) => {
    if (!Array.isArray(content)) return { role, content };
    return { role, content: (await Promise.all(content.map(embedPart))).filter(Boolean) };
  });
  return { ...body, messages: await Promise.all(messages) };
}

/** Returns all images of a conversation as data URLs, by id. */
export async function dataUrls(conversation) {
  const stored = await store.images(conversation).catch(() => []);
  const found = [...stored, ...unstoredOf(conversation)];
  return Object.fromEntries(
    await Promise.all(found.map(async ([id, blob]) => [id, await dataUrl(blob)])),
  );
}

/** Shows `blob` in an element, and releases the URL when the browser has read it. */
function load(picture, blob) {
  const url = URL.createObjectURL(blob);
  for (const end of ["load", "error"]) {
    picture.addEventListener(end, () => URL.revokeObjectURL(url), { once: true });
  }
  picture.src = url;
}

async function enlarge(image) {
  const picture = dialog.querySelector("img");
  picture.alt = image.name;
  load(picture, await blobOf(image));
  dialog.showModal();
}

dialog.addEventListener("click", ({ target }) => target.tagName === "IMG" || dialog.close());
dialog.addEventListener("close", () => dialog.querySelector("img").removeAttribute("src"));

/** Returns the element of an image, which calls `fail` if it cannot be shown. */
function pictureOf(image, fail) {
  const key = image.id ?? image;
  let picture = pictures.get(key);
  if (!picture) {
    picture = element("img", { alt: "" });
    pictures.set(key, picture);
    blobOf(image).then((blob) => (blob ? load(picture, blob) : picture.onerror()));
  }
  picture.onerror = () => {
    pictures.delete(key);
    fail();
  };
  return picture;
}

/**
 * Returns a list of thumbnails.
 * @param {function} remove adds a button to each that removes its image
 * @param {function} reject gets images that cannot be shown
 */
export function thumbnails(images, remove, reject) {
  // Safari drops the role of lists without bullets.
  const list = element("ul", { class: "images", role: "list", "aria-label": "Images" });
  for (const image of images) {
    const { name } = image;
    const item = element("li");
    const fail = () => (reject ? reject(image) : item.replaceChildren(`${name}: not stored`));
    const open = () => enlarge(image);
    item.append(button(pictureOf(image, fail), open, { "aria-label": `Enlarge ${name}` }));
    const drop = () => remove(image);
    if (remove) item.append(button("✕", drop, { "aria-label": `Remove ${name}` }));
    list.append(item);
  }
  return list;
}
