// Questions to the server, by paths beside this page.

import { key } from "./store.js";

function headers() {
  const given = key();
  return given ? { Authorization: `Bearer ${given}` } : {};
}

/** What an answer that is no success says. */
async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // The status says enough.
  }
  const error = new Error(message);
  error.status = response.status;
  return error;
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** What a path has behind it for the chosen model, where there are several. */
export function ofModel() {
  const { value } = document.getElementById("which");
  return value ? `?model=${encodeURIComponent(value)}` : "";
}

/**
 * Asks for an answer, and gives the objects of its stream as they come.
 * @param {object} body as OpenAI's chat completions have it
 * @param {AbortSignal} signal ends the answer
 */
export async function* answer(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const lines = held.split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer broke off");
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
