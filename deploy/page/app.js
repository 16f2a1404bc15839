// The page's controls: takes a document, sends the request, and shows the answer and its repetition.

import * as api from "./api.js";
import { Run, compare, number } from "./run.js";

const get = (id) => document.getElementById(id);
const LARGEST = 16e6; // bytes of a file that is opened
const PASTED_AT_ONCE = 5000; // characters
const DEMO_CHARACTERS_PER_TOKEN = 1.5; // fewer than tokenizers pack, so that the demo document fits the context

const tab = { context: null, chats: false, stop: null, first: null };

function say(text) {
  get("status").textContent = text;
}

function complain(text) {
  get("error").textContent = text;
  get("error").hidden = !text;
}

async function findModel() {
  try {
    const { name, context, chats } = await api.model();
    Object.assign(tab, { context, chats });
    if (chats) get("continuation-hint").textContent = "The model answers what is placed here, after the document.";
    get("model").textContent = `${name} · context of ${number(context)} tokens`;
    get("model").hidden = false;
  } catch (error) {
    complain(error.message);
  }
}

function setDocument(text, from) {
  get("document").value = text;
  get("document").scrollTop = 0;
  showSize();
  complain("");
  say(`${from}: ${number(text.length)} characters.`);
}

function showSize() {
  const { length } = get("document").value;
  get("size").textContent = length ? `${number(length)} characters` : "Empty";
}

async function openFile(file) {
  if (!file) return;
  if (file.size > LARGEST) return complain(`${file.name} is larger than ${number(LARGEST / 1e6)} MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError("binary");
    setDocument(text, file.name);
  } catch {
    complain(`${file.name} is not a text file in UTF-8.`);
  }
}

async function openDemo() {
  try {
    const text = await api.demo();
    const most = tab.context ? DEMO_CHARACTERS_PER_TOKEN * tab.context : Infinity;
    setDocument(text.slice(0, most), "A file of Python's standard library");
  } catch (error) {
    complain(error.message);
  }
}

// The request as the fields say it.
function asked() {
  const document = get("document").value;
  const continuation = get("continuation").value;
  const between = document && continuation && !document.endsWith("\n") ? "\n" : "";
  const seed = get("seed").value;
  const prompt = document + between + continuation;
  return {
    ...(tab.chats && prompt ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: get("max-tokens").valueAsNumber,
    temperature: get("temperature").valueAsNumber,
    // Drawn here, so that the repetition without speculation has the same one.
    seed: seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(seed),
  };
}

// Sends a request and shows its answer; returns the run, complete or not.
async function answer(title, body) {
  const run = new Run(title, body.messages?.[0].content ?? body.prompt, tab.context);
  get("runs").append(run.element);
  if (get("results").getBoundingClientRect().top > innerHeight - 100) get("results").scrollIntoView(); // on a phone
  tab.stop = new AbortController();
  get("start").textContent = "Stop (Esc)";
  get("plain").ariaDisabled = "true";
  complain("");
  say("Waiting for the first token: the server reads the document.");
  const clock = setInterval(() => run.show(), 50);
  try {
    for await (const chunk of api.complete(body, tab.stop.signal)) {
      if (!run.tokens.length && chunk.choices[0].token_ids?.length) say("The answer streams.");
      run.add(chunk);
    }
    const rate = run.rate ? `, ${number(run.rate, 1)} tokens/s` : "";
    say(`Done: ${number(run.tokens.length)} tokens in ${number(run.totalMs / 1e3, 1)} s${rate}.`);
  } catch (error) {
    if (error.name === "AbortError") {
      say(`Stopped after ${number(run.tokens.length)} tokens.`);
    } else {
      say("");
      complain(error.message);
    }
  } finally {
    clearInterval(clock);
    run.show();
    tab.stop = null;
    get("start").textContent = "Start";
  }
  if (!run.tokens.length) run.element.remove();
  return run;
}

async function start() {
  const body = asked();
  if (body.prompt === "") {
    complain("There is no text to continue: paste or open a document, or write a question.");
    return get("document").focus();
  }
  get("runs").replaceChildren();
  get("verdict").hidden = true;
  tab.first = null;
  const run = await answer("With speculation", body);
  if (!run.tokens.length) return;
  tab.first = { run, body };
  get("plain").ariaDisabled = "false";
}

async function repeat() {
  const { run, body } = tab.first;
  for (const other of get("runs").children) if (other !== run.element) other.remove();
  for (const span of run.spans) span.classList.remove("differs");
  get("verdict").hidden = true;
  const plain = await answer("Without speculation", { ...body, speculation: { lookaheads: [0, 0] } });
  get("plain").ariaDisabled = "false";
  if (plain.tokens.length) judge(run, plain);
}

function judge(run, plain) {
  const { equal, at, cut } = compare(run, plain);
  const times = run.rate && plain.rate ? run.rate / plain.rate : null;
  const speed = times ? `, ${number(times, times < 10 ? 2 : 0)}× the speed` : "";
  const title = equal
    ? `${cut ? `The first ${number(at)} tokens are equal` : `Same text: all ${number(at)} tokens are equal`}${speed}`
    : `The texts differ from token ${number(at + 1)} on`;
  const seconds = ({ totalMs }) => number(totalMs / 1e3, 1);
  const rates = times ? `${number(run.rate, 1)} instead of ${number(plain.rate, 1)} tokens/s. ` : "";
  const totals = cut ? "" : `${seconds(run)} instead of ${seconds(plain)} s in total, reading included. `;
  const why = equal
    ? cut ? "One of the answers was not complete, so the rest was not compared." : ""
    : "In 16-bit precision either of two nearly tied tokens may be drawn. In float32 such ties are very rare.";
  get("verdict-title").textContent = title;
  get("verdict-details").textContent = rates + totals + why;
  get("verdict").className = equal ? "equal" : "differ";
  get("verdict").hidden = false;
  for (const { text } of [run, plain]) text.scrollTop = 0; // equal lines beside each other
}

get("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (tab.stop) tab.stop.abort();
  else start();
});
get("plain").addEventListener("click", () => {
  if (get("plain").ariaDisabled === "false") repeat();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tab.stop?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !tab.stop) get("request").requestSubmit();
});

get("document").addEventListener("input", showSize);
get("document").addEventListener("paste", (event) => {
  // Chromium takes minutes to insert thousands of lines as an edit that can be undone; as a value, none.
  const text = event.clipboardData.getData("text/plain");
  if (text.length < PASTED_AT_ONCE) return;
  event.preventDefault();
  const field = get("document");
  field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
  showSize();
});
get("open").addEventListener("click", () => get("file").click());
get("file").addEventListener("change", () => {
  openFile(get("file").files[0]);
  get("file").value = ""; // so that the same file can be opened again
});
get("demo").addEventListener("click", openDemo);

for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", name === "dragover");
    if (name === "drop") openFile(event.dataTransfer.files[0]);
  });
}

findModel();
