// The worker: samite, on the GPU if it can be used, otherwise on the processor.

let writer;
let waits = false;

/** Whether this browser can suspend WebAssembly until a promise is done. */
const suspends = "Suspending" in WebAssembly && "promising" in WebAssembly;
if (!suspends) {
  // Nothing waits on the processor, so that these are never needed.
  WebAssembly.Suspending ??= function (call) {
    return call;
  };
  WebAssembly.promising ??= (call) => call;
}

async function open(asked) {
  const { default: init, Writer } = await import("./samite_browser.js");
  await init();
  let why = "";
  if (asked !== "cpu") {
    try {
      if (!suspends) throw new Error("this browser cannot suspend a program that waits for it");
      writer = await Writer.on_gpu();
      waits = true;
    } catch (error) {
      if (asked === "gpu") throw error;
      why = error.message;
    }
  }
  writer ??= Writer.on_cpu();
  return { device: `${waits ? "GPU" : "CPU"}: ${writer.device()}`, why };
}

async function write({ prompt, tokens, temperature, seed }) {
  const piece = (text) => postMessage({ kind: "piece", text });
  const speed = waits
    ? await writer.write_waiting(prompt, tokens, temperature, seed, piece)
    : writer.write(prompt, tokens, temperature, seed, piece);
  return { speed };
}

onmessage = async ({ data }) => {
  try {
    if (data.kind === "open") postMessage({ kind: "opened", ...(await open(data.device)) });
    else postMessage({ kind: "written", ...(await write(data)) });
  } catch (error) {
    postMessage({ kind: "failed", why: String(error?.message ?? error) });
  }
};
