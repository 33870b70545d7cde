// The page: sends prompts to the worker, shows what comes. In its address, `device=gpu` or `device=cpu` asks for one, `seed` and `temperature` set these.

const asked = new URLSearchParams(location.search);
const form = document.querySelector("form");
const button = form.querySelector("button");
const story = document.getElementById("story");
const status = document.getElementById("status");
const worker = new Worker("worker.js", { type: "module" });
let device = "";

const handlers = {
  opened(message) {
    device = message.device;
    status.textContent = message.why ? `${device} (no GPU: ${message.why})` : device;
    status.dataset.state = "ready";
    button.disabled = false;
  },
  piece({ text }) {
    story.append(text);
  },
  written({ speed }) {
    status.textContent = `${device}, ${speed.toFixed(0)} tokens/s`;
    status.dataset.state = "written";
    button.disabled = false;
  },
  failed({ why }) {
    status.textContent = why;
    status.dataset.state = "failed";
  },
};
worker.onmessage = ({ data }) => handlers[data.kind](data);
worker.onerror = (event) => handlers.failed({ why: event.message ?? "the worker does not start" });
worker.postMessage({ kind: "open", device: asked.get("device") });

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = form.elements.prompt.value;
  button.disabled = true;
  status.dataset.state = "writing";
  story.textContent = prompt;
  worker.postMessage({
    kind: "write",
    prompt,
    tokens: Number(asked.get("tokens") ?? 250),
    temperature: Number(asked.get("temperature") ?? 0.8),
    seed: Number(asked.get("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0]),
  });
});
