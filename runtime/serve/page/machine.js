// What the server does at the moment: its model, where the model's parts run, the memory for that, and the slots.

import { get, ofModel } from "./client.js";

const dialog = document.getElementById("machine");
const body = document.getElementById("machine-body");
let timer = null;

export function open() {
  dialog.showModal();
  refresh();
}

document.getElementById("machine-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => clearTimeout(timer));

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
};

function table(head, rows) {
  const made = document.createElement("table");
  const top = head.length ? made.createTHead().insertRow() : null;
  for (const name of head) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    top.append(cell);
  }
  const inside = made.createTBody();
  for (const row of rows) {
    const line = inside.insertRow();
    for (const value of row) {
      const cell = line.insertCell();
      if (value instanceof Node) cell.append(value);
      else cell.textContent = value;
      if (typeof value === "number" || /^[\d.]+ [KMGT]?i?B$/.test(value)) cell.className = "number";
    }
  }
  return made;
}

function part(title, ...children) {
  const heading = document.createElement("h3");
  heading.textContent = title;
  return [heading, ...children];
}

/** What may be switched off on a server is left out. */
const optional = (path) => get(path).catch(() => null);

async function refresh() {
  let shown;
  try {
    const [props, slots, plan] = await Promise.all([get(`props${ofModel()}`), optional(`slots${ofModel()}`), optional(`plan${ofModel()}`)]);
    shown = [...model(props), ...(plan ? where(plan) : []), ...(slots ? work(slots) : [])];
  } catch (error) {
    const message = document.createElement("p");
    message.className = "error";
    message.textContent = `The server does not say: ${error.message}`;
    shown = [message];
  }
  if (!dialog.open) return;
  body.replaceChildren(...shown);
  timer = setTimeout(refresh, 1000);
}

function model(props) {
  const rows = [
    ["model", props.model_alias ?? ""],
    ["file", props.model_path ?? ""],
    ["server", props.build_info ?? ""],
    ["context of a request", `${props.default_generation_settings?.n_ctx ?? 0} tokens`],
    ["slots", String(props.total_slots ?? 1)],
    ["devices", (props.devices ?? []).join(", ")],
  ];
  return part("Model", table([], rows.filter((row) => row[1])));
}

function where(plan) {
  const splits = plan.splits.map((split, index) => [String(index), split.device, split.operations]);
  const memory = (rows, of) =>
    rows.map((row) => [
      row.memory + of,
      ...[row.weights, row.kv, row.compute, row.weights + row.kv + row.compute].map(bytes),
    ]);
  const rows = [...memory(plan.memory, ""), ...memory(plan.draft?.memory ?? [], `, ${plan.draft?.model}`)];
  const devices = plan.devices.map((device) => [
    device.name,
    device.kind,
    device.description,
    device.memory ? `${bytes(device.memory.free)} of ${bytes(device.memory.total)}` : "",
  ]);
  return [
    ...part("Devices", table(["name", "kind", "description", "free memory"], devices)),
    ...part("Plan of a token", table(["split", "device", "operations"], splits)),
    ...part("Memory", table(["memory", "weights", "cache", "compute", "sum"], rows)),
  ];
}

function work(slots) {
  const rows = slots.map((slot) => {
    const next = slot.next_token?.[0] ?? {};
    const used = document.createElement("meter");
    used.max = slot.n_ctx || 1;
    used.value = slot.n_cached ?? 0;
    used.title = `${slot.n_cached ?? 0} of ${slot.n_ctx} tokens`;
    used.textContent = used.title;
    const state = !slot.is_processing ? "free" : slot.is_paused ? "waits for its reader" : next.n_decoded ? "writes" : "reads";
    return [String(slot.id), state, slot.n_prompt_tokens ?? "", slot.n_prompt_tokens_cache ?? "", next.n_decoded ?? "", used];
  });
  return part("Slots", table(["slot", "state", "prompt", "known", "written", "context"], rows));
}
