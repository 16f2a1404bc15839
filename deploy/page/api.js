// Talks to the server, and says in words what went wrong.

export class Refused extends Error {}

const UNREACHABLE = "The server cannot be reached. Check that it runs and that the network is up, then try again.";

const TOO_LONG = (said) => `The text is too long for this server. ${said}`;

// By the status of an answer, or by the code of its error.
const WORDS = {
  401: () => "The server does not accept the API key any more. Reload the page, and give a valid key as the password.",
  403: () => "This API key may not do that.",
  413: TOO_LONG,
  context_length_exceeded: TOO_LONG,
  429: (said, wait) => `The server is busy${wait ? `; try again in ${wait} s` : ""}. ${said}`,
  503: (said) => `The server cannot answer right now. ${said}`,
  504: (said) => `The server gave up, because the answer took too long. ${said}`,
};

// Where the server wants an API key, the browser asked for it before the page was loaded, and sends it with each call.
async function ask(path, options = {}) {
  let answer;
  try {
    // A page opened as http://name:key@host/ has a base with credentials, which fetch refuses; `origin` has none.
    answer = await fetch(new URL(path, location.origin + location.pathname), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(UNREACHABLE);
  }
  if (answer.ok) return answer;
  // A proxy's answer may be other JSON than ours, or none.
  const { message: said = "", code } = await answer.json().then((body) => body?.error ?? {}, () => ({}));
  const wait = answer.headers.get("retry-after");
  const words = WORDS[code] ?? WORDS[answer.status] ?? (() => `The server refuses this request (${answer.status}). ${said}`);
  throw new Refused(words(said, wait).trim());
}

// The served model: its name and its context length in tokens.
export async function model() {
  const { data } = await (await ask("v1/models")).json();
  return { name: data[0].id, context: data[0].max_model_len ?? data[0].context_length, chats: data[0].chats };
}

// A long text that the server has.
export async function demo() {
  return (await ask("page/demo.py")).text();
}

// The chunks of a completion, or of a chat, as they come. Throws `Refused`, or an AbortError after `signal`.
export async function* complete(body, signal) {
  const answer = await ask(body.messages ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, return_token_ids: true }),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(`The connection broke before the answer was complete. ${UNREACHABLE}`);
    }
    if (read.done) throw new Refused("The connection ended before the answer was complete.");
    const events = (rest + read.value).split("\n\n");
    rest = events.pop(); // not complete yet
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment: the server is alive, and the request waits
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(`The server stopped this answer. ${chunk.error.message}`);
      yield chunk;
    }
  }
}
