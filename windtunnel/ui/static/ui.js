"use strict";
// The what-if page: knobs, questions to the server (the latest wins), and what it answers.
(() => {
  const byId = (id) => document.getElementById(id);
  const DEBOUNCE_MS = 60;
  const TAB = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const GROUPS = [["deployment", "Deployment"], ["engine", "Engine"], ["load", "Load"], ["goals", "Objectives and price"]];
  const OPEN_ON_PHONES = ["load"];
  const narrow = window.matchMedia("(max-width: 900px)").matches;
  const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 4 });
  const bytes = (number) => `${(number / 2 ** 30).toFixed(2)} GiB`;

  let start = null; // what the server says of itself
  let state = { preset: "", settings: {} };
  let pinned = null; // { state, parts } of A
  let parts = {}; // the latest answer, by kind of part
  let values = {}; // where the knobs stand
  let latest = 0;
  let under_way = null;
  const knobs = new Map(); // name → the control

  const timings = (window.windtunnelTimings = []);

  // --- small things

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "on") Object.entries(value).forEach(([event, action]) => made.addEventListener(event, action));
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  function same(one, other) {
    return JSON.stringify(one) === JSON.stringify(other);
  }
  function shownValue(knob, value) {
    if (value === null || value === undefined) return "–";
    if (value === "inf") return "∞";
    if (value === "none") return "no limit";
    if (typeof value === "boolean") return value ? "on" : "off";
    return typeof value === "number" ? whole.format(value) : String(value);
  }

  // --- knobs

  function buildKnobs() {
    for (const [group, title] of GROUPS) {
      const own = start.knobs.filter((knob) => knob.group === group && !knob.hidden);
      const box = element("fieldset", { "aria-label": title });
      own.forEach((knob) => box.append(buildKnob(knob)));
      const is_open = !narrow || OPEN_ON_PHONES.includes(group);
      byId("groups").append(element("details", { open: is_open }, element("summary", {}, title), box));
    }
    start.knobs.filter((knob) => knob.hidden).forEach((knob) => knobs.set(knob.name, { knob, update: () => {} }));
  }

  function buildKnob(knob) {
    const is_half = HALF.includes(knob.kind) && !WIDE.includes(knob.name);
    const id = "knob-" + knob.name;
    const reset = element("button", { type: "button", class: "reset", hidden: true, on: { click: () => turn(knob.name, undefined, true) } });
    const error = element("p", { class: "knob-error", id: id + "-error" });
    const help = element("p", { class: SHOWN_HELP.includes(knob.name) ? "help" : "unseen", id: id + "-help" }, knob.help);
    const described = `${id}-help ${id}-error`;
    const made = MAKERS[knob.kind](knob, id, described);
    const label = knob.kind === "switch" ? null : element("label", { for: id }, knob.label);
    const box = element("div", { class: is_half ? "knob half" : "knob", "data-knob": knob.name, title: knob.help },
      element("div", { class: "top" }, label, knob.kind === "switch" ? made.control : null, reset),
      knob.kind === "switch" ? null : made.control, help, error);
    knobs.set(knob.name, {
      knob, box,
      update() {
        const value = values[knob.name];
        const turned = knob.name in state.settings;
        box.hidden = value === undefined || (value === null && !turned && NEEDS_VALUE.has(knob.kind));
        box.classList.toggle("turned", turned);
        reset.hidden = !turned;
        const base = (parts.memory && parts.memory.base_values || {})[knob.name];
        const back = base === null || base === undefined ? "default" : shownValue(knob, base);
        reset.textContent = is_half || back.length > 9 ? "back" : `back to ${back}`;
        reset.setAttribute("aria-label", `${knob.label}: back to ${back}`);
        made.set(value);
      },
      complain(text) {
        error.textContent = text;
        box.querySelectorAll("input, select").forEach((input) => input.setAttribute("aria-invalid", text ? "true" : "false"));
      },
    });
    return box;
  }
  const SHOWN_HELP = ["objectives", "gpu_hour"];
  const HALF = ["choice", "number", "switch"];
  const WIDE = ["model"];
  const NEEDS_VALUE = new Set(["stops", "range", "switch"]);

  const MAKERS = {
    stops: makeSlider,
    range: makeSlider,
    choice(knob, id, described) {
      const select = element("select", { id, "aria-describedby": described, on: {
        change() { const found = options().find((value) => String(value) === select.value); if (found !== undefined) turn(knob.name, found); },
      } });
      let extra;
      const options = () => (extra === undefined || extra === null || knob.choices.includes(extra) ? knob.choices : [extra, ...knob.choices]);
      return { control: select, set(value) {
        extra = value;
        const none = value === null || value === undefined ? [element("option", { value: "" }, "not given")] : [];
        select.replaceChildren(...none, ...options().map((each) =>
          element("option", { value: String(each) }, typeof each === "number" ? whole.format(each) : String(each))));
        select.value = none.length ? "" : String(value);
      } };
    },
    switch(knob, id, described) {
      const box = element("input", { type: "checkbox", id, "aria-describedby": described, on: { change: () => turn(knob.name, box.checked) } });
      return { control: element("label", { class: "check", for: id }, box, knob.label), set(value) { box.checked = value === true; } };
    },
    number: makeField,
    text: makeField,
  };

  function makeSlider(knob, id, described) {
    let stops = [];
    const slider = element("input", { type: "range", id, min: 0, step: 1, "aria-describedby": described, on: {
      input(event) { turn(knob.name, stops[Number(slider.value)], false, event); },
    } });
    const field = element("input", { type: "text", inputmode: "decimal", "aria-label": `${knob.label}, exact value`, "aria-describedby": described, on: {
      change() { turn(knob.name, read(field.value)); },
      keydown(event) { if (event.key === "Enter") { event.preventDefault(); turn(knob.name, read(field.value)); } },
    } });
    function read(text) {
      const plain = text.trim().toLowerCase();
      if (plain === "") return undefined;
      if (knob.last && (plain === knob.last || plain === "∞" || plain === "no limit")) return knob.last;
      const found = /^([\d.,_\s]+)([km]?)$/i.exec(text.trim());
      if (!found) return plain;
      const factor = { k: 1000, m: 1e6, K: 1024, M: 1048576, "": 1 }[found[2]];
      return Number(found[1].replace(/[,_\s]/g, "")) * factor;
    }
    function base() {
      if (knob.kind === "stops") return knob.stops;
      const number = Math.round((knob.high - knob.low) / knob.step);
      return Array.from({ length: number + 1 }, (_, k) => Number((knob.low + k * knob.step).toFixed(6)));
    }
    return {
      control: element("div", { class: "row" }, slider, field),
      set(value) {
        const most = Math.max(...base());
        stops = base();
        if (typeof value === "number" && !stops.includes(value)) stops = [...stops, value].sort((one, other) => one - other);
        if (knob.last) stops = [...stops, knob.last];
        slider.max = stops.length - 1;
        const place = stops.indexOf(value);
        slider.value = place < 0 ? (value > most ? stops.length - 1 : 0) : place;
        const unit = knob.unit && typeof value === "number" ? " " + knob.unit : "";
        slider.setAttribute("aria-valuetext", value === "inf" ? "all at once" : shownValue(knob, value) + unit);
        if (document.activeElement !== field) field.value = shownValue(knob, value);
      },
    };
  }

  function makeField(knob, id, described) {
    const is_text = knob.kind === "text";
    const field = element("input", { type: "text", id, "aria-describedby": described, class: is_text ? "wide" : null,
      inputmode: is_text ? null : "decimal", spellcheck: "false", on: {
        change() { turn(knob.name, read(field.value)); },
        keydown(event) { if (event.key === "Enter") { event.preventDefault(); turn(knob.name, read(field.value)); } },
      } });
    function read(text) {
      if (text.trim() === "") return is_text && values[knob.name] ? "" : undefined;
      if (is_text) return text.trim();
      const number = Number(text.replace(/[,_\s]/g, ""));
      return Number.isNaN(number) ? text : number;
    }
    return { control: field, set(value) { if (document.activeElement !== field) field.value = value === null || value === undefined ? "" : String(value); } };
  }

  // undefined turns it back to what the preset says
  function turn(name, value, refocus, event) {
    const settings = { ...state.settings };
    if (value === undefined) delete settings[name];
    else settings[name] = value;
    if (same(settings, state.settings)) return;
    state = { ...state, settings };
    if (value !== undefined) values[name] = value;
    showTurned();
    const control = knobs.get(name);
    if (control.box) {
      control.update();
      if (refocus) control.box.querySelector("input, select").focus();
    }
    remember();
    askSoon(event ? event.timeStamp : performance.now());
  }

  function showTurned() {
    const chips = Object.entries(state.settings).map(([name, value]) => element("button", {
      type: "button", title: "Take this back", "aria-label": `Take back ${name} = ${shownValue(null, value)}`,
      on: { click: () => turn(name, undefined) },
    }, `${name} = ${shownValue(null, value)} ✕`));
    if (chips.length > 1) chips.push(element("button", { type: "button", on: { click: () => choose(state.preset) } }, "take back all"));
    const held = [...byId("turned").children].indexOf(document.activeElement);
    byId("turned").replaceChildren(...chips);
    if (held >= 0) (chips[Math.min(held, chips.length - 1)] || byId("preset")).focus();
  }

  function choose(preset) {
    const { gpu_hour } = state.settings;
    state = { preset, settings: gpu_hour === undefined ? {} : { gpu_hour } };
    applyState();
  }
  function applyState() {
    byId("preset").value = state.preset;
    const found = start.presets.find((each) => each.name === state.preset);
    byId("preset-help").textContent = found ? found.description : "";
    Object.assign(values, state.settings);
    showTurned();
    remember();
    askSoon(performance.now());
  }

  // --- the state in the address, so that a link leads back to it

  function encoded(of) {
    const query = new URLSearchParams({ preset: of.preset });
    Object.entries(of.settings).forEach(([name, value]) => query.set(name, String(value)));
    return query;
  }
  function decoded(query) {
    const settings = {};
    for (const [name, text] of query) {
      if (name === "preset" || name === "pin") continue;
      const control = knobs.get(name);
      settings[name] = control ? valueOf(control.knob, text) : text;
    }
    return { preset: query.get("preset") || start.presets[0].name, settings };
  }
  function valueOf(knob, text) {
    if (knob.kind === "text" || text === knob.last) return text;
    if (knob.kind === "switch") return text === "true" ? true : text === "false" ? false : text;
    const choice = knob.choices.find((each) => String(each) === text);
    if (choice !== undefined) return choice;
    return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text);
  }
  function address() {
    const query = encoded(state);
    if (pinned) query.set("pin", encoded(pinned.state).toString());
    return "#" + query.toString();
  }
  function remember() {
    history.replaceState(null, "", address());
  }
  async function recall() {
    const query = new URLSearchParams(location.hash.slice(1));
    state = decoded(query);
    pinned = null;
    const pin = query.get("pin");
    if (pin) {
      const of = decoded(new URLSearchParams(pin));
      const answer = {};
      await ask(of, TAB + "-pin", new AbortController().signal, (part) => { answer[part.part] = part; });
      if (answer.run && !answer.error) pinned = { state: of, parts: answer };
    }
    applyState();
    showPin();
  }

  // --- questions

  let timer = null;
  let asked_at = 0;
  let first_input = null;
  function askSoon(input_time) {
    if (first_input === null) first_input = input_time;
    clearTimeout(timer);
    const wait = Math.max(0, asked_at + DEBOUNCE_MS - performance.now());
    timer = setTimeout(askNow, wait);
  }
  async function askNow() {
    const number = ++latest;
    const asked = state;
    const timing = { number, input: first_input, sent: performance.now() };
    first_input = null;
    asked_at = timing.sent;
    if (under_way) under_way.abort();
    under_way = new AbortController();
    byId("result").classList.add("busy");
    byId("result").setAttribute("aria-busy", "true");
    let fresh = {};
    try {
      await ask(state, TAB, under_way.signal, (part) => {
        if (number !== latest || part.part === "superseded") return;
        fresh = { ...fresh, [part.part]: part };
        take(fresh, part, timing, asked);
      });
    } catch (error) {
      if (error.name !== "AbortError" && number === latest) {
        showError({ message: `The server does not answer (${error.message}): is windtunnel ui still running?`, place: "" });
      }
    }
    if (number === latest) {
      byId("result").classList.remove("busy");
      byId("result").setAttribute("aria-busy", "false");
    }
  }

  async function ask(of, tab, signal, tell) {
    const response = await fetch("/api/what-if", {
      method: "POST", signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ preset: of.preset, settings: of.settings, tab }),
    });
    if (!response.ok) {
      const told = await response.json();
      tell(told.error ? { ...told.error, part: "error" } : told);
      return;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.filter(Boolean).forEach((line) => tell(JSON.parse(line)));
    }
  }

  // --- answers

  function take(fresh, part, timing, asked) {
    if (part.part === "error") {
      if (!fresh.memory) parts = { ...parts, error: part };
      showError(part);
      return;
    }
    if (part.part === "end") return;
    parts = fresh;
    let drawn = [];
    if (part.part === "memory") drawn = [showMemory(part, asked)];
    if (part.part === "run") {
      timing.server_ms = part.ms;
      timing.received = performance.now();
      drawn = showRun(part);
    }
    if (part.part === "saturation") showAnswer(part);
    if (part.part !== "run") return;
    Promise.all(drawn).then(() => requestAnimationFrame(() => requestAnimationFrame(() => {
      timing.drawn = performance.now();
      timings.push(timing);
      showEffort(part, timing);
    })));
  }

  function lines(box, texts) {
    byId(box).replaceChildren(...texts.map((text) => element("p", {}, text)));
    byId(box).hidden = !texts.length;
  }
  function list(box, texts) {
    byId(box).replaceChildren(...texts.map((text) => element("li", {}, text)));
  }

  // a link may begin with what has no answer: the knobs stand where the preset has them
  async function populate() {
    byId("result").classList.add("empty");
    await ask({ preset: state.preset, settings: {} }, TAB + "-pin", new AbortController().signal, (part) => {
      if (part.part !== "memory" || parts.memory) return;
      values = { ...part.values, ...state.settings };
      knobs.forEach((control) => control.update());
    });
  }

  // for those who listen; the same words are not said again
  function say(text) {
    if (byId("live").textContent !== text) byId("live").textContent = text;
  }

  function showSentences(first, more) {
    byId("sentences").textContent = first.join(" ");
    byId("reasons").hidden = !more.length;
    byId("reasons").lastElementChild.textContent = more.join(" ");
  }

  function showBasis(sentences) {
    byId("stated").textContent = sentences.slice(0, 1).join(" ");
    byId("rests-on").hidden = sentences.length < 2;
    byId("rests-on").lastElementChild.textContent = sentences.slice(1).join(" ");
  }

  function showError(error) {
    knobs.forEach((control, name) => control.complain && control.complain(name === error.place ? error.message : ""));
    lines("error", error.message.split("\n"));
    byId("result").classList.add("stale");
    if (!parts.memory && start) populate();
    if (!parts.memory) byId("what").textContent = state.preset;
    byId("answer-box").className = "answer tone-bad";
    byId("headline").textContent = error.kind === "infeasible" ? "vLLM does not start like this." : "There is no answer to this.";
    showSentences([], []);
    if (error.kind === "out_of_time") byId("headline").textContent = "This takes too long to show at once.";
    say(""); // the error is an alert of its own
  }

  function showMemory(part, asked) {
    values = asked === state ? { ...part.values } : { ...part.values, ...state.settings }; // knobs moved since stay there
    byId("result").classList.remove("empty");
    showDiffers();
    byId("what").textContent = [part.memory ? part.memory.title : part.name, part.cost ? `cost model ${part.cost.name}` : ""].filter(Boolean).join(" · ");
    const badge = byId("calibration");
    badge.textContent = part.cost ? part.cost.badge : "";
    badge.className = `badge ${part.cost ? part.cost.evidence : ""}`;
    knobs.forEach((control) => { control.complain && control.complain(""); control.update(); });
    lines("error", []);
    showBasis(part.cost ? part.cost.sentences : []);
    lines("warnings", [...part.warnings, ...(part.memory ? part.memory.warnings : [])]);
    byId("serve").textContent = part.serve_command.text || `# ${part.serve_command.why}`;
    byId("scenario").textContent = part.scenario_text;
    list("notes", [...part.notes, ...(part.memory ? part.memory.notes : [])]);
    byId("settings").tBodies[0].replaceChildren(...part.settings.map((entry) => element("tr", {}, ...["section", "key", "value", "source"].map((key) =>
      element("td", { "data-name": key, class: key === "source" ? null : "code" }, element("span", {}, entry[key]))))));
    const memory = part.memory;
    const stops = memory && memory.verdict === "does_not_start";
    document.querySelectorAll(".of-run").forEach((box) => { box.hidden = stops; });
    byId("cards").hidden = stops;
    byId("calibration").hidden = !part.cost;
    if (stops) byId("objectives").hidden = true;
    byId("pin").hidden = stops;
    byId("more").hidden = true;
    byId("memory-lead").textContent = memory ? memoryWords(memory) : part.memory_note;
    list("assumptions", memory ? memory.assumptions : []);
    showRemedies(memory);
    byId("figure-waterfall").hidden = !(memory && memory.figure);
    if (stops) showDoesNotStart(memory);
    return memory && memory.figure ? figures.show(memory.figure) : undefined;
  }

  function memoryWords(memory) {
    if (!memory.num_gpu_blocks) return "";
    const { low, high } = memory.interval_90;
    const spread = low === high ? "" : ` (${whole.format(low)} to ${whole.format(high)} in nine starts of ten)`;
    const words = `KV cache: ${whole.format(memory.kv_cache_tokens)} tokens${spread} in ${whole.format(memory.num_gpu_blocks)} blocks of ` +
      `${whole.format(memory.block_size)}, room for ${memory.max_concurrency.toFixed(2)} requests of the longest context at once; ` +
      `${bytes(memory.oom_margin_bytes)} of the card stay free.`;
    const a = pinned && pinned.parts.memory.memory;
    if (!a || !a.num_gpu_blocks) return words;
    return `${words} A: ${whole.format(a.kv_cache_tokens)} tokens (${change(memory.kv_cache_tokens, a.kv_cache_tokens)} here).`;
  }

  function showDoesNotStart(memory) {
    byId("result").classList.remove("stale");
    byId("answer-box").className = "answer tone-bad";
    byId("headline").textContent = "vLLM does not start like this.";
    showSentences([memory.reason], []);
    say(`vLLM does not start like this. ${memory.remedies.length} single changes help.`);
    document.title = "does not start – windtunnel";
    showStrip("bad", "does not start", []);
  }

  function showRemedies(memory) {
    const box = byId("remedies");
    const there = memory ? memory.remedies : [];
    box.hidden = !memory || memory.verdict === "ok";
    if (box.hidden) return;
    const lead = memory.verdict === "unsafe" ? memory.reason : there.length ? "What makes it start, each by itself:" :
      "No single change makes it start: take a larger GPU, more of them, or a smaller model.";
    box.replaceChildren(element("p", {}, lead), ...there.map((remedy) => element("div", { class: "remedy" },
      remedy.can_apply
        ? element("button", { type: "button", on: { click: () => { turn(remedy.flag, remedy.value === null ? undefined : remedy.value); byId("answer").focus(); } } }, remedy.text)
        : element("b", {}, remedy.text),
      element("span", {}, [`${whole.format(remedy.kv_cache_tokens)} KV tokens`, remedy.verdict === "unsafe" ? "unsafe" : "", remedy.cost,
        remedy.can_apply ? "" : "not a knob of this page"].filter(Boolean).join("; ")))));
  }

  function showRun(part) {
    byId("result").classList.remove("stale");
    showAnswer(part);
    lines("warnings", part.run_warnings);
    if (part.calibrated_by.length) showBasis(part.calibrated_by);
    byId("objectives").hidden = !part.objectives.length;
    byId("objectives").replaceChildren(...part.objectives.map((each) => element("li", {},
      element("span", { class: `badge ${each.passed ? "good" : "bad"}` }, each.passed ? "✓ kept" : "✗ missed"), " ",
      element("span", { class: "code" }, each.text), ` measured ${each.measured}`)));
    showLatencies(part);
    const there = new Set(part.figures.map((figure) => figure.name));
    document.querySelectorAll("figure.of-run").forEach((box) => { box.hidden = !there.has(box.id.replace("figure-", "")); });
    return part.figures.map((figure) => figures.show(figures.overlaid(figure, pinnedFigure(figure.name))));
  }
  function pinnedFigure(name) {
    return pinned ? pinned.parts.run.figures.find((figure) => figure.name === name) : undefined;
  }

  // "run", and again "saturation", when it is known how far it is from that
  function showAnswer(part) {
    byId("answer-box").className = `answer tone-${part.tone}`;
    byId("headline").textContent = part.headline;
    const note = part.part === "saturation" && part.utilisation !== null ? [`Utilisation ${part.utilisation.toFixed(2)}: ${part.utilisation_note}.`] : [];
    showSentences([...part.sentences.slice(0, 2), ...note], part.sentences.slice(2));
    byId("cards").replaceChildren(...part.cards.map(card));
    showMore(part);
    say([part.headline, ...part.cards.slice(0, 4).map((each) => `${each.name} ${each.text}.`)].join(" "));
    document.title = `${part.verdict.replace("_", " ")} – windtunnel`;
    showStrip(part.tone, part.verdict.replace("_", " "), part.cards);
  }

  // a verdict needs a run that is long enough
  function showMore(part) {
    const most = start.max_requests;
    const button = byId("more");
    button.hidden = part.verdict !== "too_short" || !parts.run || parts.run.num_requests >= most || values.num_requests === null;
    button.textContent = `Simulate ${whole.format(most)} requests`;
    button.onclick = () => { turn("num_requests", most); byId("answer").focus(); };
  }

  function card(each) {
    const a = pinnedCard(each.key);
    const versus = a === undefined ? null : element("span", { class: "versus" }, element("b", {}, `A ${a.text}`), " ", ...judged(each, a));
    return element("li", { "data-card": each.key }, element("span", { class: "name" }, each.name), element("span", { class: "value" }, each.text),
      element("span", { class: "more" }, each.more), versus);
  }
  function pinnedCard(key) {
    if (!pinned) return undefined;
    const of = pinned.parts.saturation || pinned.parts.run;
    return of.cards.find((each) => each.key === key);
  }
  function judged(each, a) {
    if (each.value === null || a.value === null) return [];
    if (each.value === a.value) return ["same"];
    if (!each.better) return [change(each.value, a.value)];
    const is_better = each.better === "lower" ? each.value < a.value : each.value > a.value;
    const word = is_better ? "better" : "worse";
    return [change(each.value, a.value), " ", element("span", { class: word }, word)];
  }
  function change(value, before) {
    if (!before) return value ? "from 0" : "same";
    const percent = 100 * (value / before - 1);
    if (Math.abs(percent) < 0.05) return "±0 %";
    if (percent >= 900) return `× ${(value / before).toFixed(0)}`;
    return `${percent > 0 ? "+" : "−"}${Math.abs(percent).toFixed(Math.abs(percent) < 10 ? 1 : 0)} %`;
  }

  function showStrip(tone, verdict, cards) {
    const some = cards.filter((each) => ["ttft", "itl", "output_throughput", "kv_peak"].includes(each.key));
    byId("strip").className = `strip tone-${tone}`;
    byId("strip").replaceChildren(element("span", {}, element("span", { class: "dot" }), verdict),
      ...some.map((each) => element("span", {}, `${each.name.split(",")[0]} `, element("b", {}, each.text))));
  }

  function showLatencies(part) {
    const statistics = part.latencies.length ? part.latencies[0].cells.map((cell) => cell.statistic) : [];
    byId("latencies").tHead.replaceChildren(element("tr", {}, element("th", { scope: "col" }, "Latency"),
      ...statistics.map((name) => element("th", { scope: "col", class: "number" }, name))));
    byId("latencies").tBodies[0].replaceChildren(...part.latencies.map((row) => element("tr", {}, element("th", { scope: "row" }, row.name),
      ...row.cells.map((cell) => {
        const a = pinnedCell(row.name, cell.statistic);
        return element("td", { class: "number" }, cell.text, a === undefined ? null : element("small", {}, `A ${a.text}`));
      }))));
  }
  function pinnedCell(name, statistic) {
    const row = pinned && pinned.parts.run.latencies.find((each) => each.name === name);
    return row ? row.cells.find((each) => each.statistic === statistic) : undefined;
  }

  function showEffort(part, timing) {
    const drawn = timing.drawn - timing.received;
    byId("effort").textContent = `${whole.format(part.num_requests)} requests in ${whole.format(part.num_steps)} steps, seed ${part.seed}, ` +
      `${part.kept ? "kept from before" : `computed in ${part.ms.toFixed(0)} ms`} and drawn in ${drawn.toFixed(0)} ms.`;
  }

  // --- A and B

  function pin() {
    if (!parts.run) return;
    pinned = { state, parts };
    remember();
    showPin();
    refresh();
  }
  function unpin() {
    pinned = null;
    remember();
    showPin();
    byId("pin").focus();
    refresh();
  }
  function swap() {
    state = pinned.state;
    applyState();
  }
  function showPin() {
    byId("pin").textContent = pinned ? "Pin this as A instead" : "Pin this as A";
    byId("swap").hidden = byId("unpin").hidden = !pinned;
    showDiffers();
  }
  function showDiffers() {
    if (!pinned) { byId("differs").textContent = ""; return; }
    const names = new Set([...Object.keys(pinned.state.settings), ...Object.keys(state.settings)]);
    const a = pinned.parts.memory.values;
    const told = [...names].filter((name) => !same(a[name], values[name]))
      .map((name) => `${name} ${shownValue(null, a[name])} → ${shownValue(null, values[name])}`);
    if (pinned.state.preset !== state.preset) told.unshift(`${pinned.state.preset} → ${state.preset}`);
    byId("differs").textContent = told.length ? `From A to this: ${told.join(", ")}.` : "A is what you see; turn a knob to compare.";
  }
  function refresh() {
    if (parts.memory && parts.memory.memory) byId("memory-lead").textContent = memoryWords(parts.memory.memory);
    if (parts.run) showRun(parts.run);
    if (parts.saturation) showAnswer(parts.saturation);
  }

  // --- copying

  async function copy(text, button) {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy by hand";
    }
    say(button.textContent);
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  // --- the beginning

  async function begin() {
    start = await (await fetch("/api/start")).json();
    byId("footer").textContent = `windtunnel ${start.version}. Simulated on this machine; nothing here was measured on a GPU. An answer simulates at most ` +
      `${whole.format(start.max_requests)} requests and takes at most ${start.limit_s} s. Figures by plotly.js (MIT licence).`;
    byId("preset").replaceChildren(...start.presets.map((each) => element("option", { value: each.name }, each.name)));
    byId("preset").addEventListener("change", (event) => choose(event.target.value));
    byId("knobs").addEventListener("submit", (event) => event.preventDefault());
    byId("pin").addEventListener("click", pin);
    byId("unpin").addEventListener("click", unpin);
    byId("swap").addEventListener("click", swap);
    byId("copy-link").addEventListener("click", (event) => copy(location.origin + location.pathname + address(), event.target));
    document.querySelectorAll("[data-copy]").forEach((button) =>
      button.addEventListener("click", () => copy(byId(button.dataset.copy).textContent, button)));
    buildKnobs();
    await recall();
    window.addEventListener("hashchange", recall);
  }
  begin().catch((error) => showError({ message: `The page could not be set up: ${error.message}`, place: "" }));
})();
