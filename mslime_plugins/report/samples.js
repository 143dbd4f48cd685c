// Shows responses of the run token by token. Text of a run becomes text nodes only, never HTML.
"use strict";
(() => {
  const steps = JSON.parse(document.getElementById("data").textContent).samples || [];
  const card = document.getElementById("samples");
  if (!card || !steps.length) return;
  const tip = document.getElementById("tip");
  const pick = Object.fromEntries([...card.querySelectorAll("select")].map((select) => [select.dataset.of, select]));
  const chosen = { step: 0, group: "", sample: 0 };
  let by = "version";

  // Small helpers

  function add(parent, name, text, classes) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (classes) node.className = classes;
    parent.appendChild(node);
    return node;
  }

  const ofGroup = () => steps[chosen.step].samples.filter((sample) => sample.group === chosen.group);
  const shown = () => ofGroup()[chosen.sample];
  const versions = (sample) => [...new Set(sample.sources.map((s) => s.version).filter((v) => v !== null))];
  const difference = ([, , , , own, trainer]) => (own == null || trainer == null ? null : trainer - own);
  const number = (value, digits) => value.toFixed(digits).replace("-", "\u2212");

  function decoded(routes) {
    if (!routes) return [];
    if (routes.list) return routes.list;
    const bytes = Uint8Array.from(atob(routes.experts), (c) => c.charCodeAt(0));
    const ids = routes.bytes === 1 ? bytes : Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] + 256 * bytes[2 * i + 1]);
    const row = routes.layers.length * routes.top_k;
    routes.list = Array.from({ length: Math.floor(ids.length / row) }, (_, t) =>
      routes.layers.map((layer, l) => [layer, [...ids.slice(t * row + l * routes.top_k, t * row + (l + 1) * routes.top_k)]]));
    return routes.list;
  }

  // Selection of a step, a group of the step, and a response of the group

  function fill(select, names, current) {
    select.replaceChildren();
    names.forEach((name, i) => { add(select, "option", name).value = i; });
    select.value = current;
    select.disabled = names.length < 2;
  }

  function choose(step, group, sample) {
    const groups = [...new Set(steps[step].samples.map((s) => s.group))];
    Object.assign(chosen, { step, group: groups[group], sample });
    fill(pick.step, steps.map((s) => s.title), step);
    fill(pick.group, groups, group);
    fill(pick.sample, ofGroup().map((s) => s.name), sample);
    draw();
  }

  pick.step.onchange = () => choose(Number(pick.step.value), 0, 0);
  pick.group.onchange = () => choose(chosen.step, Number(pick.group.value), 0);
  pick.sample.onchange = () => choose(chosen.step, Number(pick.group.value), Number(pick.sample.value));
  for (const radio of card.querySelectorAll("input[name=by]")) radio.onchange = () => { by = radio.value; draw(); };

  // Drawing a response: its prompt, then a block for each turn and for each text from outside

  function draw() {
    const sample = shown(), body = card.querySelector(".sample");
    const scale = Math.max(0.1, ...sample.tokens.map(difference).filter((d) => d !== null).map(Math.abs));
    card.querySelector(".known").textContent = sample.known + (sample.error ? ` · ${sample.error}` : "");
    body.replaceChildren();
    add(body, "pre", sample.prompt, "prompt");
    let block = null, last = null;
    sample.tokens.forEach((token, i) => {
      const source = sample.sources[token[1]];
      if (!last || source.turn !== last.turn || source.outside !== last.outside) {
        const head = source.outside ? "from outside (tool or environment)" : source.turn ? `turn ${source.turn}` : "response";
        add(body, "h4", head);
        block = add(body, "pre", undefined, source.outside ? "answer outside" : "answer");
      }
      last = source;
      const span = add(block, "span", token[0]);
      if (token.length > 2) { span.dataset.i = i; paint(span, token, source, versions(sample), scale); }
    });
    legend(sample, scale);
  }

  function paint(span, token, source, known, scale) {
    if (token[6]) span.classList.add("call");
    if (by === "version") {
      if (source.version !== null) span.classList.add(`by${known.indexOf(source.version) % 8}`);
      if (!source.trained && !source.outside) span.classList.add("untrained");
    } else if (by === "mask") {
      span.classList.add(source.trained ? "by2" : source.outside ? "plain" : "by1");
    } else {
      const d = difference(token);
      if (d === null) { span.classList.add("plain"); return; }
      span.style.background = shade(d / scale);
    }
  }

  // More likely to the trainer than to the sampler: blue; less: orange. The square root shows small differences too.
  const shade = (part) => `color-mix(in srgb, var(${part > 0 ? "--c0" : "--c1"}) ${Math.round(75 * Math.sqrt(Math.min(1, Math.abs(part))))}%, transparent)`;

  function legend(sample, scale) {
    const box = card.querySelector(".legend");
    box.replaceChildren();
    const item = (text, classes, background) => {
      const line = add(box, "span");
      const mark = add(line, "i", "\u00a0\u00a0\u00a0", classes);
      if (background) mark.style.background = background;
      line.append(text);
    };
    if (by === "version") versions(sample).forEach((v, i) => item(`weights ${v}`, `by${i % 8}`));
    if (by === "mask") { item("trained", "by2"); item("sampled, not trained", "by1"); item("from outside", "plain"); }
    if (by === "difference") {
      if (!sample.tokens.some((t) => difference(t) !== null)) item("trainer's log-probs unknown", "plain");
      else for (const part of [-1, -0.25, 0.25, 1]) item(`${number(part * scale, 3)} nats`, "", shade(part));
      if (sample.tokens.some((t) => difference(t) !== null)) item("trainer minus sampler", "");
    }
    if (sample.tokens.some((t) => t[6])) item("tool call", "call");
  }

  // Facts about a token

  function row(label, value) {
    const line = add(tip, "div");
    add(line, "span", label);
    add(line, "b", value);
  }

  function tell(token, sample) {
    const [text, from, position, id, own, trainer] = token;
    const source = sample.sources[from];
    tip.replaceChildren();
    add(tip, "b", JSON.stringify(text));
    row("position, id", `${position}, ${id}`);
    if (source.outside) row("from", "outside");
    else row("weights", `${source.version}${source.age ? `, age ${source.age}` : ""}${source.engine ? `, ${source.engine}` : ""}`);
    row("trained", source.trained ? "yes" : "no");
    if (own != null) row("log-prob, sampler", number(own, 4));
    if (trainer != null) row("log-prob, trainer", number(trainer, 4));
    if (own != null && trainer != null) row("difference", number(trainer - own, 4));
    if (token[7]) row("drawn from", `${token[7]} ids`);
    if (token[6]) row("part of", "a tool call");
    const routes = decoded(sample.routes);
    for (const [layer, experts] of routes[position] || []) row(`experts, layer ${layer}`, experts.join(" "));
    if (sample.routes && !routes[position]) row("experts", "not kept");
  }

  card.addEventListener("pointermove", (event) => {
    const at = event.target.dataset ? event.target.dataset.i : undefined;
    if (at === undefined) { tip.style.visibility = "hidden"; return; }
    tell(shown().tokens[Number(at)], shown());
    tip.style.visibility = "visible";
    tip.style.left = Math.max(4, Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8)) + "px";
    const below = event.clientY + 16 + tip.offsetHeight < window.innerHeight;
    tip.style.top = Math.max(4, below ? event.clientY + 16 : event.clientY - 12 - tip.offsetHeight) + "px";
  });
  card.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; });

  choose(0, 0, 0);
})();
