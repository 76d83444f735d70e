// The page shows what the gateway's own endpoints say; nothing here is kept, and nothing is asked of other hosts.
import { Plots } from "/ui/plots.js";
import { drawBlocks } from "/ui/blocks.js";
import { showTimeline } from "/ui/timeline.js";

const POLL_MS = 1000;
const at = (id) => document.getElementById(id);
const history = [];
let model = "";
let shown = "";
let answering = null;

export function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  node.className = className;
  return node;
}

function headers() {
  const key = at("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  return body;
}

// -- chat ------------------------------------------------------------------------------------------------------

function addMessage(text, className) {
  const node = element("div", text, `message ${className}`);
  at("messages").append(node);
  node.scrollIntoView({ block: "end" });
  return node;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((l) => l.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(prompt) {
  history.push({ role: "user", content: prompt });
  addMessage(prompt, "user");
  const node = addMessage("", "assistant");
  const text = document.createTextNode("");
  node.append(text);
  answering = new AbortController();
  at("stop").hidden = false;
  at("send").hidden = true;
  let id = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      signal: answering.signal,
      body: JSON.stringify({
        model, messages: history, stream: true,
        temperature: Number(at("temperature").value), max_tokens: Number(at("max-tokens").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      text.data += event.choices[0]?.delta?.content ?? "";
      at("messages").scrollTop = at("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") addMessage(error.message, "error");
  } finally {
    answering = null;
    at("stop").hidden = true;
    at("send").hidden = false;
  }
  // What was not answered must not be asked again with the next question.
  if (text.data) history.push({ role: "assistant", content: text.data });
  else { history.pop(); node.remove(); }
  if (id) {
    const note = element("small");
    const button = element("button", "why did it take so long?");
    button.onclick = () => show(id);
    note.append(button);
    node.append(note);
    await show(id);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = at("prompt").value.trim();
  if (!prompt || answering) return;
  at("prompt").value = "";
  ask(prompt);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("stop").onclick = () => answering?.abort();

// -- what runs -------------------------------------------------------------------------------------------------

async function show(id) {
  shown = id;
  try {
    showTimeline(at("timeline"), await get(`/v1/requests/${encodeURIComponent(id)}/timeline`));
  } catch (error) {
    at("timeline").replaceChildren(element("p", error.message, "message error"));
  }
}

const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`);

function row(cells) {
  const node = document.createElement("tr");
  for (const cell of cells) {
    const td = document.createElement("td");
    td.append(cell);
    node.append(td);
  }
  return node;
}

function listRequests(requests) {
  at("requests").replaceChildren(...requests.map((request) => {
    const button = element("button", request.request_id);
    button.onclick = () => show(request.request_id);
    const phase = request.phase.replace("PHASE_KIND_", "").toLowerCase();
    return row([
      button, request.prompt_tokens, request.output_tokens || "",
      request.first_token_seconds ? seconds(request.first_token_seconds) : "",
      request.ended ? seconds(request.ended - request.arrived) : phase,
    ]);
  }));
}

function listGroups(groups) {
  at("groups").replaceChildren(...groups.map((group) => {
    const held = group.num_blocks - group.num_free_blocks - group.num_cached_blocks;
    const share = group.num_blocks ? `${((100 * held) / group.num_blocks).toFixed(1)} %` : "";
    return row([group.group_id || group.addresses[0], group.num_running, group.num_waiting, group.pending_prompt_tokens,
      share, group.ready ? "yes" : "no"]);
  }));
}

const plots = new Plots(at("plots"));

async function poll() {
  try {
    const [status, blocks, requests] = await Promise.all(
      [get("/v1/status"), get("/v1/blocks"), get("/v1/requests?limit=8")]);
    if (!model) {
      model = (await get("/v1/models")).data[0].id;
      at("model").textContent = model;
    }
    at("state").textContent = `cell ${status.cell}, epoch ${status.epoch}, step ${status.step}, store ${status.store}`;
    at("state").classList.remove("bad");
    at("blocks-note").textContent = drawBlocks(at("blocks"), blocks.groups);
    listRequests(requests.data);
    listGroups(status.groups);
    plots.add(status);
    if (requests.data.some((request) => request.request_id === shown && !request.ended)) await show(shown);
  } catch (error) {
    at("state").textContent = error.message;
    at("state").classList.add("bad");
  }
  setTimeout(poll, POLL_MS);
}

poll();
