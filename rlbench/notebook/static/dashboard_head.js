// Built from extension/src/widgets by extension/bundle.mjs: change those.

// src/asks.ts
var Trouble = class extends Error {
  constructor(kind, message, status = 0) {
    super(message);
    this.kind = kind;
    this.status = status;
  }
  kind;
  status;
};
var FOLLOW_MS = 300;
async function followed(api, name, verb, args, wait) {
  let command = await api.command(name, verb, args);
  while (command.state === "running" && verb !== "close") {
    await wait(FOLLOW_MS);
    command = await api.followed(name, command.id);
  }
  return command;
}

// src/wire.ts
function readListing(value) {
  const found = object(value);
  const time = number(found["time"]) ?? 0;
  return {
    time,
    sessions: list(found["sessions"]).map((row) => listed(row, time)),
    memory: machine(found["memory"]),
    gpus: list(found["gpus"]).map((gpu) => ({
      ...machine(gpu) ?? { used: 0, total: 0 },
      name: text(gpu["name"])
    })),
    gpusError: text(found["gpus_error"])
  };
}
function listed(row, now) {
  const name = text(row["name"]);
  if (row["state"] !== "parked") {
    return { name, state: row["state"] === "live" ? "live" : "gone" };
  }
  const parked = {
    model: text(row["model"]),
    step: number(row["step"]) ?? 0,
    version: number(row["version"]) ?? 0,
    bytes: number(row["bytes"]) ?? 0,
    age: Math.max(0, now - (number(row["time"]) ?? now)),
    lost: Array.isArray(row["lost"]) ? row["lost"].map(text) : []
  };
  return { name, state: "parked", parked };
}
function readState(value) {
  const found = object(value);
  if (!isObject(found["view"])) {
    throw new Trouble("old", "the monitor serves no view");
  }
  return {
    time: number(found["time"]) ?? 0,
    step: number(found["step"]) ?? 0,
    version: number(found["version"]) ?? 0,
    branch: text(found["branch"]),
    engines: list(found["engines"]).map(engine),
    historyTotal: number(found["history_total"]) ?? 0,
    history: list(found["history"]).map(step),
    samples: list(found["samples"]).map(sample),
    view: found["view"]
    // typed by what the monitor makes it of
  };
}
function readCommand(value) {
  const found = object(object(value)["command"]);
  const error = object(found["error"]);
  const state = found["state"];
  return {
    id: text(found["id"]),
    verb: text(found["verb"]),
    state: state === "running" || state === "failed" ? state : "done",
    error: [text(error["kind"]), text(error["message"])].filter((said) => said).join(": "),
    result: object(found["result"]),
    seconds: Math.max(0, (number(found["ended"]) ?? 0) - (number(found["started"]) ?? 0))
  };
}
function engine(row) {
  return {
    name: text(row["name"]),
    bytes: numbers(row["bytes"]),
    workers: list(row["workers"]).map((worker) => ({
      name: text(worker["name"]),
      resident: number(worker["resident"])
    }))
  };
}
function step(row, index) {
  return {
    step: number(row["step"]) ?? index + 1,
    reward: number(row["reward"]),
    length: number(row["length"])
  };
}
function sample(row) {
  const owners = Object.entries(object(row["owners"]));
  return {
    time: number(row["time"]) ?? 0,
    resident: numbers(row["resident"]),
    owners: Object.fromEntries(owners.map(([worker, held]) => [worker, numbers(held)]))
  };
}
function machine(value) {
  const { used, total } = numbers(value);
  return used !== void 0 && total ? { used, total } : null;
}
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
function object(value) {
  return isObject(value) ? value : {};
}
function list(value) {
  return Array.isArray(value) ? value.map(object) : [];
}
function text(value) {
  return typeof value === "string" ? value : typeof value === "number" ? String(value) : "";
}
function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
function numbers(value) {
  const found = Object.entries(object(value));
  return Object.fromEntries(
    found.filter((pair) => number(pair[1]) !== null)
  );
}

// src/api.ts
var LIMIT_MS = 8e3;
var KILL_LIMIT_MS = 12e4;
var Api = class {
  constructor(connection) {
    this.connection = connection;
  }
  connection;
  async sessions() {
    try {
      return readListing(await this.ask(["sessions"]));
    } catch (error) {
      if (error instanceof Trouble && error.status === 404) {
        throw new Trouble("absent", "it was started without the extension rlbench.labapp", 404);
      }
      throw error;
    }
  }
  async state(name, question) {
    const query = { history: String(question.history) };
    if (question.since !== void 0) {
      query["since"] = String(question.since);
    }
    const value = await this.ask(["sessions", name, "look"], query);
    const why = told(value, "error");
    if (why) {
      throw new Trouble(kindOf(told(value, "state")), why);
    }
    return readState(value);
  }
  async command(name, verb, args) {
    return readCommand(await this.ask(["sessions", name, "command"], {}, { verb, args }));
  }
  async followed(name, id) {
    return readCommand(await this.ask(["sessions", name, "command", id]));
  }
  async kill(name) {
    const said = await this.ask(["sessions", name, "kill"], {}, {}, KILL_LIMIT_MS);
    return told(said, "message");
  }
  async ask(path, query = {}, body, limit = LIMIT_MS) {
    const { baseUrl } = this.connection;
    const asked = String(new URLSearchParams(query));
    const place = ["rlbench", "api", ...path.map(encodeURIComponent)].join("/");
    const url = `${baseUrl}${place}${asked && `?${asked}`}`;
    const init = { signal: AbortSignal.timeout(limit) };
    if (body !== void 0) {
      init.method = "POST";
      init.body = JSON.stringify(body);
    }
    let response;
    let said;
    try {
      response = await this.connection.request(url, init);
      said = await response.text();
    } catch (error) {
      throw new Trouble("server", error instanceof Error ? error.message : String(error));
    }
    const value = parsed(said);
    if (value === void 0) {
      const why = `HTTP ${response.status} ${response.statusText}`.trim();
      throw new Trouble("server", why, response.status);
    }
    if (!response.ok) {
      const why = told(value, "error") || told(value, "message") || response.statusText;
      throw new Trouble(kindOf(told(value, "state")), why, response.status);
    }
    return value;
  }
};
function parsed(said) {
  try {
    return JSON.parse(said);
  } catch {
    return void 0;
  }
}
function kindOf(state) {
  return state === "unknown" || state === "gone" || state === "silent" ? state : "refused";
}
function told(value, key) {
  const found = typeof value === "object" && value !== null ? value[key] : "";
  return typeof found === "string" ? found : "";
}

// src/widgets/connection.ts
function pageApi() {
  const config = settings();
  const { baseUrl, token } = config;
  if (!baseUrl) {
    return null;
  }
  return new Api({
    baseUrl,
    request: (url, init) => {
      const headers = new Headers({ "Content-Type": "application/json" });
      const xsrf = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)?.[1];
      if (xsrf) {
        headers.set("X-XSRFToken", xsrf);
      }
      if (token) {
        headers.set("Authorization", `token ${token}`);
      }
      return fetch(url, { ...init, headers, credentials: "same-origin", cache: "no-store" });
    }
  });
}
function settings() {
  const text2 = document.getElementById("jupyter-config-data")?.textContent;
  return text2 ? JSON.parse(text2) : {};
}

// src/format.ts
var KIB = 2 ** 10;
var MIB = 2 ** 20;
var GIB = 2 ** 30;
function digits(value) {
  return Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// src/widgets/dom.ts
var MIB2 = 2 ** 20;
function add(parent, tag, className = "", text2) {
  const node = document.createElement(tag);
  if (className) {
    node.className = className;
  }
  if (text2 !== void 0) {
    node.textContent = text2;
  }
  parent.append(node);
  return node;
}
function setText(node, text2) {
  if (node.textContent !== text2) {
    node.textContent = text2;
  }
}

// src/widgets/model.ts
var Listening = class {
  constructor(model) {
    this.model = model;
  }
  model;
  on(event, handler) {
    this.model.on(event, handler);
    this.handlers.push([event, handler]);
  }
  close() {
    for (const [event, handler] of this.handlers) {
      this.model.off(event, handler);
    }
  }
  handlers = [];
};
function tell(model, message) {
  try {
    model.send(message);
    return true;
  } catch {
    return false;
  }
}
function unique() {
  return Math.random().toString(36).slice(2) + Date.now().toString(36);
}

// src/widgets/press.ts
var Server = class {
  constructor(api, name) {
    this.api = api;
    this.name = name;
  }
  api;
  name;
  known = false;
  async knows() {
    if (!this.known && this.api) {
      try {
        await this.api.state(this.name, { history: 0 });
        this.known = true;
      } catch (error) {
        if (!(error instanceof Trouble)) {
          throw error;
        }
      }
    }
    return this.known;
  }
  /** What became of a press; null where the server did not take it, and the kernel is to be asked. */
  async press({ verb, args }) {
    if (!this.api || !await this.knows()) {
      return null;
    }
    const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
    try {
      return await followed(this.api, this.name, verb, args, wait);
    } catch (error) {
      if (error instanceof Trouble && error.kind === "server") {
        this.known = false;
        return null;
      }
      throw error;
    }
  }
};
function answerOf(control, { state, error, result, seconds }) {
  if (state === "failed") {
    return `${control.command}: ${error}`;
  }
  const said = (control.args.parts ?? []).filter((part) => part in result).map((part) => `now ${String(result[part])}`);
  const { stopped, version, label } = result;
  if (Array.isArray(stopped)) {
    said.push(stopped.length ? stopped.join(", ") : "nothing ran");
  }
  if (typeof version === "number" && control.verb === "sync") {
    said.push(`v${version}`);
  }
  if (typeof label === "string" && label) {
    said.push(label);
  }
  return `${control.command}: ${[...said, "done"].slice(0, 2).join(" · ")} · ${digits(seconds)} s`;
}

// src/widgets/head.ts
var QUIET_MS = 9e3;
var KERNEL_PATIENCE_MS = 1500;
var head_default = () => {
  let lastHeard = Date.now();
  return {
    initialize({ model }) {
      const heard = () => {
        lastHeard = Date.now();
      };
      model.on("msg:custom", heard);
      for (const name of ["head", "controls", "said", "trouble"]) {
        model.on(`change:${name}`, heard);
      }
    },
    render({ model, el }) {
      const head = new Head(model, el, () => lastHeard);
      return () => head.close();
    }
  };
};
var Head = class {
  constructor(model, el, lastHeard) {
    this.model = model;
    this.el = el;
    this.lastHeard = lastHeard;
    this.parts = makeHead(el);
    this.server = new Server(pageApi(), model.get("name"));
    this.listening = new Listening(model);
    this.error = model.get("head").error;
    requestAnimationFrame(this.claim);
    this.listening.on("change:head", this.draw);
    this.listening.on("change:trouble", this.draw);
    this.listening.on("change:controls", this.decorate);
    this.listening.on("change:said", this.hear);
    this.clock = setInterval(this.draw, 1e3);
    window.addEventListener("pagehide", this.leave);
    void this.server.knows().then(this.decorate);
    tell(model, { here: true, page: this.page });
    this.draw();
  }
  model;
  el;
  lastHeard;
  close() {
    this.shown = false;
    clearInterval(this.clock);
    window.removeEventListener("pagehide", this.leave);
    this.frame?.removeEventListener("click", this.click, true);
    this.listening.close();
    this.leave();
  }
  draw = () => {
    const { head, trouble } = { head: this.model.get("head"), trouble: this.trouble() };
    drawHead(this.parts, this.model.get("name"), head);
    if (this.error !== head.error) {
      this.error = head.error;
      this.status = { text: "", bad: false };
    }
    const said = this.status.text ? this.status : { text: this.error, bad: true };
    const lines = [trouble, said].filter((line) => line?.text);
    setText(this.parts.status, lines.map((line) => line.text).join(" · "));
    this.parts.status.classList.toggle(
      "rlb-w",
      lines.some((line) => line.bad)
    );
    this.parts.root.classList.toggle("rlb-stale", Boolean(trouble));
  };
  /** Why the numbers are old; null while they are new. */
  trouble() {
    const { text: text2, since, ended } = this.model.get("trouble");
    if (ended) {
      return { text: `${text2}: these are its last numbers`, bad: false };
    }
    if (text2) {
      return { text: `stale ${ago(since * 1e3)}: ${text2}`, bad: true };
    }
    if (Date.now() - this.lastHeard() <= QUIET_MS) {
      return null;
    }
    const why = "the kernel says nothing, it is held up or gone";
    const way = this.server.known ? "; the controls go on through the Jupyter server" : "";
    return { text: `stale ${ago(this.lastHeard())}: ${why}${way}`, bad: true };
  }
  say(text2, bad = false) {
    this.status = { text: text2, bad };
    this.draw();
  }
  async press(control) {
    const what = control.command;
    this.say(`${what} …`);
    try {
      const command = await this.server.press(control);
      if (command) {
        this.answer(control, command);
        return;
      }
    } catch (error) {
      this.say(error instanceof Error ? error.message : String(error), true);
      return;
    }
    const id = unique();
    this.waiting.set(id, control);
    if (!tell(this.model, { do: control.key, id, page: this.page })) {
      this.waiting.delete(id);
      this.say(`${what}: neither the kernel nor the Jupyter server reaches the session`, true);
      return;
    }
    setTimeout(() => {
      if (this.waiting.has(id)) {
        this.say(`${what}: the kernel is busy; takes effect when the cell ends`);
      }
    }, KERNEL_PATIENCE_MS);
  }
  answer(control, command) {
    this.say(answerOf(control, command), command.state === "failed");
  }
  hear = () => {
    const { id = "", error, command } = this.model.get("said");
    const control = this.waiting.get(id);
    if (!control) {
      return;
    }
    this.waiting.delete(id);
    if (error) {
      this.say(error, true);
    } else {
      this.answer(control, readCommand({ command }));
    }
  };
  click = (event) => {
    const node = event.target.closest(".rlb-control");
    const found = /\brlb-control-(\d+)\b/.exec(node?.className ?? "")?.[1];
    const control = this.model.get("controls")[Number(found)];
    if (node && control && !node.disabled) {
      event.preventDefault();
      event.stopPropagation();
      void this.press(control);
    }
  };
  /** The frame is known once the head has been put into it. */
  claim = () => {
    this.frame = this.el.closest(".rlb-dashboard");
    if (this.frame) {
      this.frame.classList.add("rlb-live");
      this.frame.addEventListener("click", this.click, true);
      this.decorate();
    } else if (this.shown) {
      requestAnimationFrame(this.claim);
    }
  };
  decorate = () => {
    requestAnimationFrame(() => {
      const late = !this.server.known && !this.model.get("hears_while_busy");
      const delay = late ? " (during a cell: takes effect when the cell ends)" : "";
      this.model.get("controls").forEach((control, i) => {
        const nodes = this.frame?.querySelectorAll(`.rlb-control-${i}`) ?? [];
        for (const node of nodes) {
          node.title = control.title + (control.enabled ? delay : "");
          node.setAttribute("aria-label", control.name);
          if (control.pressed !== null) {
            node.setAttribute("aria-pressed", String(control.pressed));
          }
        }
      });
    });
  };
  leave = () => {
    tell(this.model, { gone: true, page: this.page });
  };
  page = unique();
  parts;
  server;
  listening;
  waiting = /* @__PURE__ */ new Map();
  clock;
  status = { text: "", bad: false };
  error;
  frame = null;
  shown = true;
};
function makeHead(el) {
  const root = add(el, "div", "rlb-head");
  const top = add(root, "div", "rlb-head-line");
  const phase = add(root, "div", "rlb-phase");
  const parts = {
    root,
    title: add(top, "b"),
    model: add(top, "span", "rlb-q"),
    place: add(top, "span"),
    phase: add(phase, "span"),
    bar: add(phase, "progress"),
    left: add(phase, "span", "rlb-q"),
    status: add(root, "div", "rlb-status")
  };
  parts.bar.max = 1;
  parts.bar.setAttribute("aria-label", "progress of what runs");
  parts.status.setAttribute("role", "status");
  return parts;
}
function drawHead(parts, name, head) {
  const { text: text2, busy, fraction, left } = head.phase;
  setText(parts.title, `rlbench · ${name}`);
  setText(parts.model, head.model);
  const branch = head.branch === "main" ? "" : ` · ${head.branch}`;
  setText(parts.place, `step ${head.step} · v${head.version}${branch}`);
  setText(parts.phase, `${busy ? "▶" : "■"} ${text2}`);
  parts.bar.hidden = !busy || fraction === null;
  if (fraction !== null) {
    parts.bar.value = fraction;
  }
  setText(parts.left, left && `~${left}`);
}
function ago(since) {
  return since ? `${Math.round((Date.now() - since) / 1e3)} s` : "";
}
export {
  head_default as default
};
