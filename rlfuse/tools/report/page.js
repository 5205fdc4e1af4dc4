"use strict";
// Draws curves from the scalars of the runs, time and lengths from plotly figures, and shows samples page by page.
// Texts of a run are set as text, never as markup.
const at = id => document.getElementById(id);
const json = id => JSON.parse(at(id).textContent);
const all = selector => [...document.querySelectorAll(selector)];
const {runs, panels, timelines, samples} = json("data");
const several = runs.length > 1, hidden = new Set();
const touch = matchMedia("(pointer: coarse)").matches;
const settings = {responsive: true, displayModeBar: false};
const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");  // plotly's labels render some HTML
const option = (select, value, text) => select.add(new Option(text, value));
const element = (tag, text, parent, kind) => {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
};

// Charts ----------------------------------------------------------------------------------------------------------

// Charts are drawn when they come near the viewport, so that a page with many opens quickly.
const whenNear = (place, action) => {
  const observer = new IntersectionObserver(entries => {
    if (!entries.some(entry => entry.isIntersecting)) return;
    observer.disconnect();
    action();
  }, {rootMargin: "400px"});
  observer.observe(place);
};
const drawn = new Map();  // place -> function that redraws it
const keep = (place, action) => whenNear(place, () => { drawn.set(place, action); action(); });
const again = () => drawn.forEach(action => action());

// Ticks of steps are whole numbers at every zoom level.
const tick = span => {
  const rough = Math.max(1, span / 6), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(factor => factor * power).find(each => each >= rough);
};
const draw = (place, data, layout) => {
  const axis = layout.xaxis;
  if (axis.title?.text === "step" && axis.range) Object.assign(axis, {dtick: tick(axis.range[1] - axis.range[0]), tick0: 0, tickformat: "d"});
  if (touch) layout.dragmode = false;  // a finger scrolls the page
  Plotly.react(place, data, layout, settings);
  if (place.watched) return;
  place.watched = true;
  place.on("plotly_relayout", change => {
    const [low, high] = place.layout.xaxis.range;
    if (place.layout.xaxis.dtick && !("xaxis.dtick" in change) && tick(high - low) !== place.layout.xaxis.dtick)
      Plotly.relayout(place, {"xaxis.dtick": tick(high - low)});
  });
};
all("[data-chart]").forEach(place => {
  const chart = json("chart-" + place.dataset.chart);
  keep(place, () => draw(place, shownTraces(place, chart.data), chart.layout));
});

// A click on a legend entry of work or waiting hides it.
const shownTraces = (place, traces) => {
  const off = new Set([...place.closest("section").querySelectorAll("[data-trace].off")].map(key => key.dataset.trace));
  return traces.map(trace => ({...trace, visible: !off.has(trace.name)}));
};
all("[data-trace]").forEach(key => key.addEventListener("click", () => { key.classList.toggle("off"); again(); }));
all("#runs button").forEach(key => key.addEventListener("click", () => {
  const number = Number(key.dataset.run);
  key.classList.toggle("off") ? hidden.add(number) : hidden.delete(number);
  all("[data-of-run]").forEach(each => { each.hidden = hidden.has(Number(each.dataset.ofRun)); });
  again();
}));

// Curves ----------------------------------------------------------------------------------------------------------

const slider = at("smoothing");
const smoothed = values => {
  const weight = Number(slider.value);
  let sum = 0, norm = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
};
const axisOf = title => ({gridcolor: "#e6e3de", zeroline: false, automargin: true, exponentformat: "e", title: title && {text: title, standoff: 6}});
const curve = (place, lines) => {
  const traces = [], smooth = slider && Number(slider.value) > 0;
  let first = Infinity, last = -Infinity;
  runs.forEach((run, number) => lines.forEach(([metric, dash]) => {
    if (!(metric in run.series)) return;
    const [list, values] = run.series[metric], steps = run.steps[list];
    first = Math.min(first, ...steps.slice(0, 1));
    last = Math.max(last, ...steps.slice(-1));
    if (hidden.has(number)) return;
    const few = steps.length < 30 || metric.startsWith("val-");
    const style = {color: run.colour, width: 2, dash: dash ? dash.replaceAll(",", "px,") + "px" : "solid"};
    const hover = `${several ? plain(run.name) + "<br>" : ""}${plain(metric)}<br>step %{x}: %{y:.4g}<extra></extra>`;
    const trace = {x: steps, y: values, mode: few ? "lines+markers" : "lines", marker: {size: 4}, line: style, hovertemplate: hover};
    if (smooth && !metric.startsWith("val-")) {
      traces.push({...trace, mode: "lines", opacity: 0.25, line: {...style, width: 1}, hoverinfo: "skip", hovertemplate: undefined});
      traces.push({...trace, mode: "lines", y: smoothed(values)});
    } else traces.push(trace);
  }));
  const room = Math.max(0.5, 0.03 * (last - first));
  draw(place, traces, {margin: {l: 46, r: 12, t: 8, b: 36}, showlegend: false, font: {family: "system-ui, sans-serif", size: 11, color: "#2b2b2b"},
    hovermode: "closest", hoverlabel: {align: "left"}, xaxis: {...axisOf("step"), range: [first - room, last + room]}, yaxis: axisOf()});
};
all("[data-panel]").forEach(place => {
  const [name, number] = place.dataset.panel.split("/");
  keep(place, () => curve(place, panels[name][Number(number)].lines));
});
if (slider) {
  const steps = Math.max(...runs.flatMap(run => run.steps.map(list => list.length)));
  slider.value = steps > 60 ? 0.8 : 0;
  const showValue = () => { at("smoothed").textContent = Number(slider.value).toFixed(2); };
  slider.addEventListener("input", () => { showValue(); again(); });
  showValue();
}

const metrics = [...new Set(runs.flatMap(run => Object.keys(run.series)))].sort(), choice = at("metric-choice");
metrics.forEach(name => option(choice, name, name));
if (metrics.length) {
  choice.value = metrics.includes("critic/score/mean") ? "critic/score/mean" : metrics[0];
  const show = () => curve(at("metric"), [[choice.value, ""]]);
  choice.addEventListener("change", show);
  keep(at("metric"), show);
}

// All visible timelines have the same time scale.
const choices = all(".timeline-choice");
const longest = () => Math.max(...choices.filter(each => !each.closest("[hidden]")).map(each => timelines[each.value][1]));
choices.forEach(choice => {
  const place = choice.closest("[data-of-run]").querySelector(".timeline");
  const show = () => {
    if (choice.closest("[hidden]")) return;
    const chart = json("timeline-" + choice.value), range = [0, longest()];
    Object.assign(chart.layout.xaxis, {range});
    Object.assign(chart.layout.xaxis2, {range});
    place.style.height = chart.layout.height + "px";
    draw(place, shownTraces(place, chart.data), chart.layout);
  };
  choice.addEventListener("change", again);
  keep(place, show);
});

// Samples ---------------------------------------------------------------------------------------------------------

// A group is a prompt with its responses: of one step, or of validation over all steps and runs.
const groups = new Map();
samples.forEach(row => {
  const prompt = row.id.slice(0, row.id.lastIndexOf("/"));
  const key = row.validation ? `validation ${row.id.split("/")[1]} ${row.data_source} ${row.prompt}` : `${row.run} ${row.step} ${prompt}`;
  if (!groups.has(key)) groups.set(key, {validation: Boolean(row.validation), rows: []});
  groups.get(key).rows.push(row);
});
groups.forEach(group => group.rows.sort((a, b) => a.step - b.step || a.run - b.run));
const rewardsOf = group => group.rows.map(row => row.reward).filter(value => value !== null);
const round = value => value === null ? "none" : String(Number(Number(value).toPrecision(4)));
const asText = value => value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);

const card = (row, group, parent) => {
  const box = element("div", "", parent, "answer");
  const alone = group.validation && group.rows.filter(other => other.step === row.step && other.run === row.run).length === 1;
  const from = [several && group.validation ? runs[row.run].name : "", group.validation ? `step ${row.step}` : "",
    alone ? "" : `response ${row.id.slice(row.id.lastIndexOf("/") + 1)}`];
  element("div", from.filter(Boolean).join(", "), box, "pale");
  element("div", row.reward === null ? "no reward" : round(row.reward), box, "reward " + (row.reward > 0 ? "good" : "bad"));
  const table = element("table", "", box);
  const facts = [...Object.entries(row.parts).map(([name, value]) => [name, round(value)]), ["note", row.note],
    ["tokens", `${row.response_tokens}, finish reason ${row.finish}`]];
  facts.filter(fact => fact[1]).forEach(([name, value]) => {
    const line = element("tr", "", table);
    element("th", name, line);
    element("td", value, line);
  });
  element("pre", row.response, box);
};
const show = (group, box) => {
  const first = group.rows[0], rewards = rewardsOf(group);
  const mean = rewards.length ? `mean reward ${round(rewards.reduce((a, b) => a + b) / rewards.length)} of ${rewards.length}` : "no rewards";
  const where = group.validation ? "validation" : `${several ? runs[first.run].name + ", " : ""}step ${first.step}, prompt ${first.id.split("/")[1]}`;
  element("p", [where, first.data_source, `${first.prompt_tokens} tokens`, mean].filter(Boolean).join(" · "), box, "note");
  const picture = group.rows.map(row => row.picture).find(Boolean);
  if (picture) {
    const sheet = element("img", "", box, "sheet");
    sheet.src = picture;
    sheet.alt = "frames of the clip";
  }
  element("h3", "prompt", box);
  element("pre", first.prompt, box);
  if (asText(first.ground_truth)) {
    element("h3", "ground truth", box);
    element("pre", asText(first.ground_truth), box);
  }
  element("h3", group.rows.length === 1 ? "response" : `${group.rows.length} responses`, box);
  const answers = element("div", "", box, "answers");
  group.rows.forEach(row => card(row, group, answers));
};

if (samples.length) {
  let shown = [], place = 0;
  const mean = values => values.length ? values.reduce((a, b) => a + b) / values.length : NaN;
  const longestOf = group => Math.max(...group.rows.map(row => row.response_tokens));
  const spread = group => Math.max(...rewardsOf(group), -Infinity) - Math.min(...rewardsOf(group), Infinity);
  const ranks = {worst: group => mean(rewardsOf(group)), best: group => -mean(rewardsOf(group)), spread: group => -spread(group), long: group => -longestOf(group)};
  const page = () => {
    at("sample").replaceChildren();
    at("sample-place").textContent = shown.length ? `${place + 1} of ${shown.length}` : "none";
    at("sample-back").disabled = place <= 0;
    at("sample-next").disabled = place >= shown.length - 1;
    if (shown[place]) show(shown[place], at("sample"));
  };
  const value = id => at(id) ? at(id).value : "";
  const choose = () => {
    const validation = value("sample-of") === "validation", run = value("sample-run"), step = value("sample-step");
    const text = value("sample-search").toLowerCase(), rank = ranks[value("sample-order")];
    shown = [...groups.values()].filter(group => group.validation === validation)
      .map(group => ({...group, rows: group.rows.filter(row => (!step || row.step === Number(step)) && (!run || row.run === Number(run)))}))
      .filter(group => group.rows.some(row => !text || (row.prompt + "\n" + row.response).toLowerCase().includes(text)));
    const order = number => Number.isNaN(number) ? Infinity : number;
    if (rank) shown.sort((a, b) => (a = order(rank(a)), b = order(rank(b)), a === b ? 0 : a - b));
    place = 0;
    page();
  };
  const steps = () => {
    const validation = value("sample-of") === "validation";
    at("sample-step").replaceChildren();
    option(at("sample-step"), "", "all");
    [...new Set(samples.filter(row => Boolean(row.validation) === validation).map(row => row.step))].sort((a, b) => a - b)
      .forEach(step => option(at("sample-step"), step, step));
    choose();
  };
  [["training", false], ["validation", true]].filter(([, kind]) => samples.some(row => Boolean(row.validation) === kind))
    .forEach(([name]) => option(at("sample-of"), name, name));
  if (several) {
    option(at("sample-run"), "", "all");
    runs.forEach((run, number) => option(at("sample-run"), number, run.name));
    at("sample-run").addEventListener("change", choose);
  }
  at("sample-of").addEventListener("change", steps);
  ["sample-step", "sample-order"].forEach(id => at(id).addEventListener("change", choose));
  at("sample-search").addEventListener("input", choose);
  at("sample-back").addEventListener("click", () => { place -= 1; page(); });
  at("sample-next").addEventListener("click", () => { place += 1; page(); });
  steps();
}
