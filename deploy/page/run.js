// One answer on the page: its tokens, coloured by the tier that wrote each, and its figures.

const TIERS = ["draft", "lookup", "retrieval", "target"];
const MEASURABLE_MS = 50; // an answer that comes faster, as one piece, has no rate that means anything
const GIVEN = 4; // lines of the prompt that are shown before the answer

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const seconds = (ms) => `${number(ms / 1e3, 2)} s`;

export class Run {
  constructor(title, prompt, context) {
    this.element = document.getElementById("run").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h3").textContent = title;
    this.text = this.element.querySelector(".text");
    this.text.ariaLabel = `Text of the answer ${title.toLowerCase()}`;
    this.context = context;
    this.tokens = [];
    this.texts = [];
    this.origins = [];
    this.held = "";
    this.spans = [];
    this.counts = Object.fromEntries(TIERS.map((tier) => [tier, 0]));
    this.began = performance.now();
    this.firstAt = this.lastAt = this.firstTokens = null;
    this.complete = false;
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = prompt.slice(-1000).split("\n").slice(-GIVEN).join("\n");
    this.text.append(given);
    this.shares = TIERS.map((tier) => {
      const share = document.createElement("i");
      share.dataset.tier = tier;
      return share;
    });
    this.element.querySelector(".shares").append(...this.shares);
  }

  // Takes what arrived; `show` puts it on the page.
  add(chunk) {
    // A chunk of a chat has its text in `delta`, and no tokens where it opens the answer.
    const [{ token_ids: ids = [], texts = [], origins = [], text = "", finish_reason: finish }] = chunk.choices;
    this.told = { ...this.told, ...chunk.triforce };
    if (ids.length) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.firstTokens ??= ids.length;
    }
    this.tokens.push(...ids);
    this.texts.push(...texts);
    this.origins.push(...origins);
    for (const tier of origins) this.counts[tier] += 1;
    // What the server held back until the end, such as half a character, belongs to the last token.
    this.held += text.slice(texts.join("").length);
    this.complete = finish !== null;
  }

  // Shows the tokens that arrived since the last call. The browser lays out the whole text at each call, so that a
  // call for every chunk of a fast stream would leave it no time to react to a key.
  showText() {
    const added = this.texts.slice(this.spans.length);
    if (!added.length && !this.held) return;
    const follow = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 40;
    const spans = added.map((text, index) => {
      const span = document.createElement("span");
      span.className = text.trim() ? "token" : "token blank";
      span.dataset.tier = this.origins[this.spans.length + index];
      span.textContent = text;
      return span;
    });
    this.spans.push(...spans);
    this.text.append(...spans);
    if (this.spans.length) this.spans.at(-1).append(this.held);
    this.held = "";
    if (follow) this.text.scrollTop = this.text.scrollHeight;
  }

  // Tokens per second after the first chunk; null while there is no time to measure it by.
  get rate() {
    const decoded = this.tokens.length - this.firstTokens;
    const ms = this.lastAt - this.firstAt;
    return decoded > 0 && ms >= MEASURABLE_MS ? (1e3 * decoded) / ms : null;
  }

  get totalMs() {
    return (this.complete ? this.lastAt : performance.now()) - this.began;
  }

  show() {
    this.showText();
    const set = (name, value) => {
      this.element.querySelector(`[data-figure="${name}"]`).textContent = value ?? "–";
    };
    const { acceptance, controller, plan, prompt_tokens: read } = this.told ?? {};
    set("rate", this.rate && number(this.rate, 1));
    set("first", this.firstAt && seconds(this.firstAt - this.began));
    set("total", seconds(this.totalMs));
    set("tokens", number(this.tokens.length));
    set("acceptance", acceptance && accepted(acceptance));
    set("plan", planInWords(controller?.plan ?? plan));
    const limit = this.context ? ` of ${number(this.context)}` : "";
    set("context", read && `${number(read)} read + ${number(this.tokens.length)} written${limit}`);
    TIERS.forEach((tier, index) => {
      this.shares[index].style.flexGrow = this.counts[tier];
      this.shares[index].hidden = !this.counts[tier];
    });
    this.element.querySelector(".counts").textContent = TIERS.filter((tier) => this.counts[tier])
      .map((tier) => `${tier} ${number((100 * this.counts[tier]) / this.tokens.length)}%`)
      .join(" · ");
  }
}

function accepted(acceptance) {
  const told = Object.entries(acceptance).filter(([, share]) => share !== null);
  return told.map(([tier, share]) => `${tier} ${number(100 * share)}%`).join(" · ") || "nothing drafted";
}

// "retrieval+model 8,3", as the server writes it: who drafts, and how many tokens each of the two tiers drafts.
function planInWords(plan) {
  if (!plan) return null;
  if (plan === "plain") return "no drafts";
  const [kind, lookaheads] = plan.split(" ");
  const [retrieval, lowest] = lookaheads.split(",");
  const names = { model: "draft model", lookup: "lookup", both: "draft model or lookup" };
  const part = (tier) => (tier === "retrieval" ? `retrieval ${retrieval}` : `${names[tier] ?? tier} ${lowest}`);
  return kind.split("+").map(part).join(", ") + " ahead";
}

// Compares two answers token by token: whether they are equal, and the index of the first difference, which is marked.
export function compare(one, other) {
  const shorter = Math.min(one.tokens.length, other.tokens.length);
  let at = 0;
  while (at < shorter && one.tokens[at] === other.tokens[at]) at += 1;
  const cut = !(one.complete && other.complete);
  const equal = at === shorter && (cut || one.tokens.length === other.tokens.length);
  if (!equal) for (const run of [one, other]) run.spans[at]?.classList.add("differs");
  return { equal, at, cut };
}
