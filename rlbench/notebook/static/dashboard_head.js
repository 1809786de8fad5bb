// Head of the dashboard: name, phase, one line of answers; and the way of a press from the controls to the monitor.
//
// A press is caught here, before ipywidgets sees it, so that a toggle shows what was measured and never what was wished.
// It goes to the Jupyter server's handlers (they work while the kernel is busy, or dead), else to the kernel.

const QUIET_MS = 9000; // the kernel says something every 5 s
const POLL_MS = 300;
const KERNEL_PATIENCE_MS = 1500;

export default () => {
  let lastHeard = Date.now();
  return {
    initialize({ model }) {
      const heard = () => { lastHeard = Date.now(); };
      model.on("msg:custom", heard);
      for (const name of ["head", "controls", "said", "trouble"]) model.on(`change:${name}`, heard);
    },
    render({ model, el }) {
      const page = unique();
      const view = makeHead(el);
      const server = new Server(model.get("name"));
      let status = { text: "", bad: false }, error = model.get("head").error;

      const draw = () => {
        drawHead(view, model);
        const trouble = troubleOf(model, lastHeard, server.known);
        if (error !== model.get("head").error) { // newer than the answer to the last press
          error = model.get("head").error;
          status = { text: "", bad: false };
        }
        const lines = [trouble, status.text ? status : error ? { text: error, bad: true } : null].filter(Boolean);
        setText(view.status, lines.map((line) => line.text).join(" · "));
        view.status.classList.toggle("rlb-w", lines.some((line) => line.bad));
        view.root.classList.toggle("rlb-stale", Boolean(trouble));
      };
      const say = (text, bad = false) => { status = { text, bad }; draw(); };
      const decorate = () => requestAnimationFrame(() => decorateControls(el, model, server));

      // -- presses
      const waiting = new Map();
      const press = async (control) => {
        say(`${sentence(control)} …`);
        try {
          if (await server.knows()) {
            say(...answerOf(control, await server.command(control.verb, control.args)));
            return;
          }
        } catch (error) {
          if (error instanceof Refused) { say(error.message, true); return; }
          if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
          server.known = false; // not reached, or somebody else answered: the kernel is asked
        }
        const id = unique();
        waiting.set(id, control);
        if (!tell(model, { do: control.key, id, page })) {
          waiting.delete(id);
          say(`${sentence(control)}: neither the kernel nor the Jupyter server reaches the session`, true);
          return;
        }
        setTimeout(() => {
          if (waiting.has(id)) say(`${sentence(control)}: the kernel is busy; takes effect when the cell ends`);
        }, KERNEL_PATIENCE_MS);
      };
      const onSaid = () => {
        const said = model.get("said");
        const control = waiting.get(said.id);
        if (!control) return;
        waiting.delete(said.id);
        if (said.error) say(said.error, true);
        else say(...answerOf(control, said.command));
      };
      const onClick = (event) => {
        const control = controlOf(event.target, el, model);
        if (!control) return;
        event.preventDefault();
        event.stopPropagation();
        press(control);
      };
      // the frame is known once the head has been put into it
      let frame = null, shown = true;
      const claim = () => {
        frame = el.closest(".rlb-dashboard");
        if (!frame) { if (shown) requestAnimationFrame(claim); return; }
        frame.classList.add("rlb-live");
        frame.addEventListener("click", onClick, true);
        decorate();
      };
      requestAnimationFrame(claim);

      // -- what changes
      const onControls = () => decorate();
      model.on("change:head", draw);
      model.on("change:trouble", draw);
      model.on("change:controls", onControls);
      model.on("change:said", onSaid);
      const clock = setInterval(draw, 1000);
      const leave = () => tell(model, { gone: true, page });
      window.addEventListener("pagehide", leave);
      server.knows().then(decorate);
      tell(model, { here: true, page });
      draw();
      return () => {
        shown = false;
        clearInterval(clock);
        window.removeEventListener("pagehide", leave);
        frame?.removeEventListener("click", onClick, true);
        model.off("change:head", draw);
        model.off("change:trouble", draw);
        model.off("change:controls", onControls);
        model.off("change:said", onSaid);
        leave();
      };
    },
  };
};

// -- drawing

function makeHead(el) {
  const make = (tag, name, parent) => {
    const node = document.createElement(tag);
    node.className = name;
    parent.append(node);
    return node;
  };
  const root = make("div", "rlb-head", el);
  const top = make("div", "rlb-head-line", root);
  const view = { root, title: make("b", "", top) };
  view.model = make("span", "rlb-q", top);
  view.place = make("span", "", top);
  const phase = make("div", "rlb-phase", root);
  view.phase = make("span", "", phase);
  view.bar = make("progress", "", phase);
  view.bar.max = 1;
  view.bar.setAttribute("aria-label", "progress of what runs");
  view.left = make("span", "rlb-q", phase);
  view.status = make("div", "rlb-status", root);
  view.status.setAttribute("role", "status");
  return view;
}

function drawHead(view, model) {
  const head = model.get("head");
  const phase = head.phase ?? {};
  setText(view.title, `rlbench · ${model.get("name")}`);
  setText(view.model, head.model ?? "");
  setText(view.place, `step ${head.step} · v${head.version}${head.branch === "main" ? "" : ` · ${head.branch}`}`);
  setText(view.phase, `${phase.busy ? "▶" : "■"} ${phase.text ?? ""}`);
  const known = phase.fraction !== null && phase.fraction !== undefined;
  view.bar.hidden = !phase.busy || !known;
  if (known) view.bar.value = phase.fraction;
  setText(view.left, phase.left_s === null || phase.left_s === undefined ? "" : `~${phase.left_s} s left`);
}

// Send the kernel a message; false where it is gone, and its comm with it.
function tell(model, message) {
  try {
    model.send(message);
    return true;
  } catch (error) {
    return false;
  }
}

// crypto.randomUUID is not there on pages without https
function unique() {
  return Math.random().toString(36).slice(2) + Date.now().toString(36);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Why the numbers are old, or null.
function troubleOf(model, lastHeard, server) {
  const trouble = model.get("trouble");
  if (trouble.ended) return { text: `${trouble.text}: these are its last numbers`, bad: false };
  if (trouble.text) return { text: `stale ${ago(trouble.since * 1000)}: ${trouble.text}`, bad: true };
  if (Date.now() - lastHeard <= QUIET_MS) return null;
  const way = server ? "; the controls go on through the Jupyter server" : "";
  return { text: `stale ${ago(lastHeard)}: the kernel says nothing, it is held up or gone${way}`, bad: true };
}

function ago(since) {
  return since ? `${Math.round((Date.now() - since) / 1000)} s` : "";
}

// -- controls

function controlOf(target, el, model) {
  const node = target.closest?.(".rlb-control");
  if (!node || node.disabled) return null;
  const name = [...node.classList].find((one) => /^rlb-control-\d+$/.test(one));
  return name ? model.get("controls")[Number(name.slice("rlb-control-".length))] : null;
}

function decorateControls(el, model, server) {
  const frame = el.closest(".rlb-dashboard");
  const late = !server.known && !model.get("hears_while_busy");
  model.get("controls").forEach((control, i) => {
    for (const node of frame?.querySelectorAll(`.rlb-control-${i}`) ?? []) {
      node.title = control.title + (late && control.enabled ? " (during a cell: takes effect when the cell ends)" : "");
      node.setAttribute("aria-label", control.name); // its text begins with the glyph of its icon
      if (control.pressed !== null) node.setAttribute("aria-pressed", String(control.pressed));
    }
  });
}

function sentence(control) {
  const { engine, parts } = control.args ?? {};
  return engine ? `${control.verb} ${(parts ?? []).join(", ").replace("_", " ")} of ${engine}` : control.verb;
}

// What became of a command, as [text, bad].
function answerOf(control, command) {
  if (command.state === "failed") return [`${sentence(control)}: ${command.error.message}`, true];
  const took = Number(((command.ended - command.started) || 0).toPrecision(3));
  const result = command.result ?? {};
  const said = [];
  for (const part of control.args?.parts ?? []) if (part in result) said.push(`now ${result[part]}`);
  if (result.stopped) said.push(result.stopped.length ? result.stopped.join(", ") : "nothing ran");
  if ("version" in result && control.verb === "sync") said.push(`v${result.version}`);
  if (result.label) said.push(String(result.label));
  return [`${sentence(control)}: ${said.concat("done").slice(0, 2).join(" · ")} · ${took} s`, false];
}

// -- the Jupyter server

class Refused extends Error {}

// The session's commands through rlbench's extension of the Jupyter server, where it is there and knows the session.
class Server {
  constructor(name) {
    const element = document.getElementById("jupyter-config-data");
    const config = element ? JSON.parse(element.textContent) : {};
    this.base = config.baseUrl ? `${config.baseUrl}rlbench/api/sessions/${encodeURIComponent(name)}` : null;
    this.token = config.token ?? "";
    this.known = false;
  }

  async knows() {
    if (this.known || !this.base) return this.known;
    try {
      const answer = await this.ask("/state?history=0");
      this.known = answer.ok;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // TypeError: fetch could not reach it
    }
    return this.known;
  }

  async command(verb, args) {
    let command = await this.json("/command", { method: "POST", body: JSON.stringify({ verb, args }) });
    while (command.state === "running") {
      await new Promise((done) => { setTimeout(done, POLL_MS); });
      command = await this.json(`/command/${command.id}`);
    }
    return command;
  }

  async json(path, options) {
    const answer = await this.ask(path, options);
    const value = await answer.json();
    if (!answer.ok) throw new Refused(String(value.error ?? value.message ?? answer.status));
    return value.command;
  }

  ask(path, options = {}) {
    const headers = { "Content-Type": "application/json" };
    const xsrf = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
    if (xsrf) headers["X-XSRFToken"] = xsrf[1];
    if (this.token) headers.Authorization = `token ${this.token}`;
    return fetch(this.base + path, { ...options, headers, credentials: "same-origin", cache: "no-store" });
  }
}
