/* The tables, the map of regions, and the values under the cursor. Text from the input reaches the
   page only through textContent. Without this script the page still has its summary, its first
   rows and its charts. */
"use strict";
(async () => {
  const ROW = 30, SPARE = 8; // pixels of a row; rows beyond the visible ones
  const SVG = "http://www.w3.org/2000/svg";
  const whole = new Intl.NumberFormat("en");
  const counted = (values) => (i) => (values[i] === null ? "" : whole.format(values[i]));
  const scaled = (values, scale, digits) => (i) => (values[i] === null ? "" : (values[i] / scale).toFixed(digits));
  const has = (values) => values.some((value) => value !== null && value !== 0 && value !== "");
  const search = (fields) => fields.text.value.trim().toLowerCase();
  offerDrawings();
  const data = await unpack(document.getElementById("data").textContent.trim());
  if (data === null) return;
  const records = data.columns ? showRecords(data) : null;
  if (data.samples) showSamples(data);
  if (data.regions) showRegions(data);
  showCharts(data, records);
  document.documentElement.dataset.ready = "true";
  performance.mark("ready");

  // A button for each drawing saves it as an SVG file that needs no style sheet.
  function offerDrawings() {
    for (const figure of document.querySelectorAll("figure[data-chart], figure[data-export]")) {
      const button = element("button", { type: "button", className: "save", textContent: "save as SVG" });
      button.addEventListener("click", () => saveDrawing(figure));
      (figure.querySelector("figcaption") ?? figure).append(button);
    }
  }

  function saveDrawing(figure) {
    const sources = [...figure.querySelectorAll("svg")].filter((svg) => !svg.closest(".legend"));
    const sheet = drawn("svg", { xmlns: SVG });
    let top = 0, widest = 0;
    for (const source of sources) {
      const box = source.getBoundingClientRect();
      const copy = source.cloneNode(true);
      const pairs = [source, ...source.querySelectorAll("*")].map((node, i) => [node, [copy, ...copy.querySelectorAll("*")][i]]);
      for (const [node, twin] of pairs) {
        const style = getComputedStyle(node);
        for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"]) twin.setAttribute(name, style.getPropertyValue(name));
      }
      for (const [name, value] of Object.entries({ x: 0, y: top, width: box.width, height: box.height })) copy.setAttribute(name, value);
      sheet.append(copy);
      top += box.height + 8;
      widest = Math.max(widest, box.width);
    }
    sheet.setAttribute("viewBox", `0 0 ${widest} ${top}`);
    const text = new XMLSerializer().serializeToString(sheet);
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "image/svg+xml" })) });
    link.download = `${figure.dataset.export ?? figure.dataset.chart}.svg`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function unpack(text) {
    if (!text || !("DecompressionStream" in window)) return null;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  function element(name, properties = {}, ...children) {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  }

  function drawn(name, attributes, ...children) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function lines(text, n) {
    return n ? text.split("\n") : [];
  }

  // --- a table of any length: only the visible rows are in the page

  /* `columns`: the columns, each with key, label, values (to sort by), text (of row i) and look.
     `linkKey`: the key of the column with a button. `matches`: returns a test of row i. */
  function showGrid(place, { noun, n, columns, linkKey, matches, moreFacts, idOf, sorting }) {
    const form = place.querySelector("form"), fields = form.elements;
    const scroller = place.querySelector(".rows"), count = place.querySelector(".count");
    const details = place.querySelector(".details");
    const orders = new Map(); // key of a column -> the order of all rows
    let rows = new Uint32Array(n), active = -1;

    // rows in ascending order; rows without a value come last in either direction
    function orderBy(key) {
      if (orders.has(key)) return orders.get(key);
      const { values } = columns.find((column) => column.key === key);
      const order = Uint32Array.from({ length: n }, (_, i) => i);
      const less = (a, b) => (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : a - b);
      const isEmpty = (i) => values[i] === null || values[i] === "";
      const full = order.filter((i) => !isEmpty(i)).sort(less);
      orders.set(key, { full, empty: order.filter(isEmpty) });
      return orders.get(key);
    }

    function select() {
      const isIn = matches(fields);
      const { full, empty } = orderBy(sorting.key);
      let k = 0;
      rows = new Uint32Array(n);
      const take = (i) => { if (isIn(i)) rows[k++] = i; };
      if (sorting.falling) for (let j = full.length - 1; j >= 0; j--) take(full[j]);
      else full.forEach(take);
      empty.forEach(take);
      rows = rows.subarray(0, k);
      active = -1;
      details.hidden = true;
      const all = `${whole.format(n)} ${n === 1 ? noun : `${noun}s`}`;
      count.textContent = k === n ? all : `${whole.format(k)} of ${all}`;
      grid.setAttribute("aria-rowcount", k + 1);
      scroller.scrollTop = 0;
      draw(true);
    }

    const heads = columns.map((column) => {
      const button = element("button", { type: "button", textContent: column.label });
      const head = element("th", { scope: "col", className: column.look }, button);
      button.addEventListener("click", () => {
        sorting = { key: column.key, falling: sorting.key === column.key ? !sorting.falling : Boolean(column.falls) };
        markSorted();
        select();
      });
      return head;
    });
    const markSorted = () =>
      heads.forEach((head, i) => {
        if (columns[i].key !== sorting.key) head.removeAttribute("aria-sort");
        else head.setAttribute("aria-sort", sorting.falling ? "descending" : "ascending");
      });
    const above = element("td", { colSpan: columns.length }), below = element("td", { colSpan: columns.length });
    const first = element("tr", { className: "space" }, above), last = element("tr", { className: "space" }, below);
    for (const space of [first, last]) space.setAttribute("aria-hidden", "true");
    const body = element("tbody", {}, first, last);
    const head = element("tr", {}, ...heads);
    head.setAttribute("aria-rowindex", 1);
    const grid = element("table", {}, element("thead", {}, head), body);
    grid.setAttribute("aria-label", `${noun[0].toUpperCase()}${noun.slice(1)}s`);
    scroller.append(grid);
    let drawnRows = [-1, -1];

    function draw(again) {
      const start = Math.max(0, Math.floor(scroller.scrollTop / ROW) - SPARE);
      const end = Math.min(rows.length, start + Math.ceil(scroller.clientHeight / ROW) + 2 * SPARE);
      if (!again && start === drawnRows[0] && end === drawnRows[1]) return;
      drawnRows = [start, end];
      above.style.height = `${start * ROW}px`;
      below.style.height = `${(rows.length - end) * ROW}px`;
      const newRows = [];
      for (let place = start; place < end; place++) newRows.push(line(place));
      const hadFocus = body.contains(document.activeElement), old = body.querySelectorAll("tr[data-place]");
      // add the new rows before removing the old ones: when the row with the focus is removed, a
      // browser lays out the page, and would scroll back if the table were shorter at that moment
      first.after(...newRows);
      for (const row of old) row.remove();
      if (hadFocus) (body.querySelector('button[tabindex="0"]') ?? scroller).focus({ preventScroll: true });
    }

    function line(place) {
      const i = rows[place];
      const cells = columns.map((column) => {
        const text = column.text(i);
        if (column.key === linkKey) {
          const button = element("button", { type: "button", textContent: text, title: text });
          button.tabIndex = place === Math.max(active, 0) ? 0 : -1;
          return element("td", { className: column.look }, button);
        }
        const cell = element("td", { className: column.look, textContent: text });
        if (!column.look.startsWith("n ")) cell.title = text;
        if (text === "virus") cell.classList.add("virus");
        if (column.share) cell.style.setProperty("--share", `${100 * column.share(i)}%`);
        return cell;
      });
      const node = element("tr", { className: place === active ? "active" : "" }, ...cells);
      node.dataset.place = place;
      node.setAttribute("aria-rowindex", place + 2);
      return node;
    }

    function go(place) {
      if (!rows.length) return;
      active = Math.min(rows.length - 1, Math.max(0, place));
      const top = active * ROW, room = scroller.clientHeight - 2 * ROW;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
      draw(true);
      body.querySelector('button[tabindex="0"]')?.focus({ preventScroll: true });
    }

    function showDetails(place) {
      const i = rows[place];
      const facts = columns.map((column) => [column.label, column.text(i)]).filter(([, text]) => text !== "");
      details.replaceChildren(
        ...[...facts, ...(moreFacts?.(i) ?? [])].map(([term, text]) =>
          element("div", {}, element("dt", { textContent: term }), element("dd", { className: "id", textContent: text })),
        ),
      );
      details.hidden = false;
    }

    scroller.addEventListener("scroll", () => draw(false), { passive: true });
    new ResizeObserver(() => draw(true)).observe(scroller);
    scroller.addEventListener("keydown", (event) => {
      if (event.target.closest("thead")) return;
      const page = Math.max(1, Math.floor(scroller.clientHeight / ROW) - 2);
      const to = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: rows.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-place]");
      if (!row) return;
      go(Number(row.dataset.place));
      showDetails(active);
    });
    form.addEventListener("input", select);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(select));
    // as in the tables of the run: a field with a quotation mark is quoted
    const field = (text) => (text.includes('"') ? `"${text.replaceAll('"', '""')}"` : text);
    const value = (column, i) => column.text(i).replaceAll(",", column.look.startsWith("n ") ? "" : ",");
    const tsv = () => [
      columns.map((column) => column.label).join("\t"),
      ...Array.from(rows, (i) => columns.map((column) => field(value(column, i))).join("\t")),
    ].join("\n");
    fields.ids?.addEventListener("click", (event) => copy(event.target, Array.from(rows, idOf).join("\n")));
    fields.rows.addEventListener("click", (event) => copy(event.target, tsv()));
    place.hidden = false;
    markSorted();
    select();
    return function find(i, text) {
      form.reset();
      fields.text.value = text;
      select();
      place.scrollIntoView();
      const at = rows.indexOf(i);
      go(at);
      showDetails(at);
    };
  }

  async function copy(button, text) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text + "\n");
    } catch {
      const area = element("textarea", { value: text + "\n" });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }

  // --- the records

  function showRecords({ columns, files, statuses, letters }) {
    const place = document.getElementById("table"), n = columns.gap.length;
    let at = 0;
    columns.index = columns.gap.map((gap) => (at += gap));
    Object.assign(columns, { record: lines(columns.record, n), note: lines(columns.note, n) });
    if (!place) return null;
    const { record, note, length, score, viral, status, file, index, fdr, regions, chunks } = columns;
    const call = (i) => (score[i] === null ? "" : viral[i] ? "virus" : "other");
    const names = files.map((name) => name.toLowerCase());
    const gridColumns = [
      { key: "index", label: "#", values: index, text: counted(index), look: "n w-index" },
      { key: "record", label: "record", values: record, text: (i) => record[i], look: "w-record" },
      { key: "file", label: "file", values: file.map((i) => names[i]), text: (i) => files[file[i]], look: "w-file", only: files.length > 1 },
      { key: "length", label: letters, values: length, text: counted(length), look: "n w-n" },
      { key: "status", label: "status", values: status.map((i) => statuses[i]), text: (i) => statuses[status[i]], look: "w-status" },
      { key: "viral", label: "call", values: viral.map((value, i) => (score[i] === null ? null : value)), text: call, look: "w-call", only: has(score) },
      { key: "score", label: "score", values: score, text: scaled(score, 1e6, 6), look: "n w-n", only: has(score) },
      { key: "fdr", label: "fdr", values: fdr, text: scaled(fdr, 1e4, 4), look: "n w-n", only: has(fdr) },
      { key: "regions", label: "regions", values: regions, text: counted(regions), look: "n w-n", only: has(regions) },
      { key: "chunks", label: "chunks", values: chunks, text: counted(chunks), look: "n w-n", only: has(chunks) },
      { key: "note", label: "note", values: note, text: (i) => note[i], look: "w-note", only: has(note) },
    ].filter((column) => column.only !== false);
    const words = record.map((id, i) => `${id}\n${note[i]}`.toLowerCase());
    const fields = place.querySelector("form").elements;
    statuses.forEach((name, i) => {
      if (status.includes(i)) fields.status.append(element("option", { value: i, textContent: name }));
    });
    const offered = files.length <= 500 ? files : [];
    offered.forEach((name, i) => fields.file.append(element("option", { value: i, textContent: name })));
    place.querySelector(".of-files").hidden = offered.length < 2;
    const number = (name) => (fields[name] && fields[name].value !== "" ? Number(fields[name].value) : null);
    const find = showGrid(place, {
      noun: "record", n, columns: gridColumns, linkKey: "record", sorting: { key: "index", falling: false },
      idOf: (i) => record[i],
      moreFacts: (i) => (files.length > 1 ? [] : [["file", files[file[i]]]]),
      matches(fields) {
        const text = search(fields), ofFile = names.map((name) => text !== "" && name.includes(text));
        const shortest = number("shortest"), lowest = number("lowest");
        const label = number("call"), state = number("status"), source = number("file");
        return (i) =>
          (text === "" || words[i].includes(text) || ofFile[file[i]]) &&
          (shortest === null || length[i] >= shortest) &&
          (lowest === null || (score[i] !== null && score[i] >= lowest * 1e6 - 0.5)) &&
          (label === null || (score[i] !== null && viral[i] === label)) &&
          (state === null || status[i] === state) &&
          (source === null || file[i] === source);
      },
    });
    return (i) => find(i, record[i]);
  }

  // --- the samples

  function showSamples({ samples }) {
    const place = document.getElementById("sample-table");
    const n = samples.columns[0].values.length;
    const texts = samples.columns.filter(({ name }) => ["file", "status", "best record", "groups"].includes(name));
    const words = Array.from({ length: n }, (_, i) => texts.map(({ values }) => values[i]).join("\n").toLowerCase());
    const dull = ({ name, values }) => name !== "records" && name !== "virus" && !has(values);
    const scored = samples.columns.find(({ name }) => name === "scored")?.values;
    const gridColumns = samples.columns.filter((column) => !dull(column)).map(({ name, values, digits }) => ({
      key: name, label: name, values, falls: digits !== null,
      text: digits === null ? (i) => values[i] : digits ? (i) => (values[i] === null ? "" : values[i].toFixed(digits)) : counted(values),
      look: name === "file" ? "w-record" : digits === null ? "w-status" : `n w-n${name === "virus" ? " bar" : ""}`,
      share: name === "virus" && scored ? (i) => values[i] / Math.max(1, scored[i]) : undefined,
    }));
    showGrid(place, {
      noun: "sample", n, columns: gridColumns, linkKey: "file", sorting: { key: "", falling: false, ...samples.sorted },
      matches(fields) {
        const text = search(fields);
        return (i) => text === "" || words[i].includes(text);
      },
    });
  }

  // --- the regions, and the map of a record

  function showRegions({ regions, tracks }) {
    const { columns } = regions, n = columns.start.length;
    const record = lines(columns.record, n), { files } = regions;
    const { file, start, end, posterior, verdict, judged, score } = columns;
    const evidence = lines(columns.evidence, n).map((text) => text.replaceAll(";", ", "));
    const length = start.map((from, i) => end[i] - from + 1);
    const words = record.map((id, i) => `${id}\n${files[file[i]]}\n${evidence[i]}`.toLowerCase());
    const show = showMap(document.getElementById("map"), tracks);
    const ofTrack = new Map(tracks.map((track, k) => [`${track.file}\t${track.record}`, k]));
    const gridColumns = [
      { key: "record", label: "record", values: record, text: (i) => record[i], look: "w-record" },
      { key: "file", label: "file", values: file.map((k) => files[k]), text: (i) => files[file[i]], look: "w-file", only: files.length > 1 },
      { key: "start", label: "start", values: start, text: counted(start), look: "n w-n" },
      { key: "end", label: "end", values: end, text: counted(end), look: "n w-n" },
      { key: "length", label: "bases", values: length, text: counted(length), look: "n w-n", falls: true },
      { key: "posterior", label: "posterior", values: posterior, text: scaled(posterior, 1e4, 4), look: "n w-n", falls: true },
      { key: "judged", label: "class", values: judged, text: (i) => judged[i], look: "w-score", only: judged.some(Boolean) },
      { key: "score", label: "record's score", values: score, text: scaled(score, 1e6, 6), look: "n w-score", falls: true, only: has(score) },
      { key: "verdict", label: "in viruses.tsv", values: verdict, text: (i) => (verdict[i] ? "yes" : "no"), look: "w-score", falls: true },
      { key: "evidence", label: "evidence", values: evidence, text: (i) => evidence[i], look: "w-evidence", only: has(evidence) },
    ].filter((column) => column.only !== false);
    showGrid(document.getElementById("region-table"), {
      noun: "region", n, columns: gridColumns, linkKey: "record", sorting: { key: "posterior", falling: true },
      matches(fields) {
        const text = search(fields), longest = fields.shortest.value === "" ? 0 : Number(fields.shortest.value);
        return (i) => (text === "" || words[i].includes(text)) && length[i] >= longest;
      },
      moreFacts(i) {
        const track = ofTrack.get(`${files[file[i]]}\t${record[i]}`);
        if (track === undefined) return [["map", "not on this page: see tracks.tsv.gz"]];
        show(track, start[i] - 1, end[i]);
        document.getElementById("map").scrollIntoView({ block: "nearest" });
        return [];
      },
    });
  }

  // about eight round numbers of bases between two places
  function rulerTicks(from, to) {
    const raw = (to - from) / 8, power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(1, power * [1, 2, 5, 10].find((m) => m * power >= raw));
    const unit = to >= 2e6 ? ["Mb", 1e6] : to >= 2e3 ? ["kb", 1e3] : ["b", 1];
    const digits = Math.max(0, Math.ceil(Math.log10(unit[1] / step)));
    const ticks = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step)
      ticks.push([at, (at / unit[1]).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
    return { ticks, unit: unit[0] };
  }

  function showMap(place, tracks) {
    const HEIGHT = 236, LEFT = 70, RIGHT = 12, RULER = 26, LANE = [34, 60], POSTERIOR = [76, 136], ODDS = [152, 226];
    const SHORTEST = 2000; // bases on the map at the closest zoom
    const svg = place.querySelector("svg.map"), strip = place.querySelector("svg.strip");
    const name = place.querySelector(".map-name"), hint = place.querySelector(".pointed");
    const picker = place.querySelector("select");
    let track = null, from = 0, to = 1, width = 800;
    tracks.forEach(({ record, file, regions }, k) =>
      picker.append(element("option", { value: k, textContent: `${record} (${file}): ${regions.length}` })));

    const x = (base) => LEFT + ((base - from) / (to - from)) * (width - LEFT - RIGHT);
    const base = (event) => from + ((event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * (to - from);
    const binAt = (at) => Math.min(track.posterior.length - 1, Math.max(0, Math.floor((at / track.length) * track.posterior.length)));

    function text(at, y, words, look, anchor = "middle") {
      return drawn("text", { x: at.toFixed(1), y, class: look, "text-anchor": anchor }, words);
    }

    // a path through the visible bins; bins that share a pixel are drawn as their largest value
    function path(values, [top, bottom], [low, high], isArea) {
      const size = track.length / values.length, y = (value) => bottom - ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * (bottom - top);
      const words = [], group = Math.max(1, Math.floor((to - from) / size / (width - LEFT - RIGHT)));
      let isDown = false;
      for (let bin = Math.floor(Math.max(0, from / size - 1) / group) * group; bin <= to / size + 1 && bin < values.length; bin += group) {
        let best = null;
        for (let k = bin; k < Math.min(values.length, bin + group); k++)
          if (values[k] !== null && (best === null || values[k] > best)) best = values[k];
        if (best === null) { isDown = false; continue; }
        words.push(`${isDown ? "L" : "M"}${x((bin + group / 2) * size).toFixed(1)} ${y(best).toFixed(1)}`);
        isDown = true;
      }
      if (isArea && words.length) words.push(`V${bottom}H${words[0].slice(1).split(" ")[0]}z`);
      return words.join("");
    }

    function draw() {
      width = Math.max(280, svg.clientWidth);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      const { ticks, unit } = rulerTicks(from, to), right = width - RIGHT;
      const clip = drawn("clipPath", { id: "map-clip" }, drawn("rect", { x: LEFT, y: 0, width: right - LEFT, height: HEIGHT }));
      const inside = drawn("g", { "clip-path": "url(#map-clip)" });
      const outside = drawn("g", {}, text(LEFT - 8, 16, unit, "tick", "end"));
      for (const [at, label] of ticks) {
        inside.append(drawn("path", { class: "grid", d: `M${x(at).toFixed(1)} ${RULER}V${HEIGHT}` }));
        const place = Math.min(right - 12, Math.max(LEFT + 8, x(at)));
        outside.append(drawn("path", { class: "axis", d: `M${x(at).toFixed(1)} ${RULER - 5}V${RULER}` }), text(place, 16, label, "tick"));
      }
      outside.append(drawn("path", { class: "axis", d: `M${LEFT} ${RULER}H${right}` }));
      for (const [label, [top, bottom]] of [["regions", LANE], ["posterior", POSTERIOR], ["log-odds", ODDS]])
        outside.append(text(LEFT - 8, (top + bottom) / 2 + 4, label, "tick", "end"));
      inside.append(drawn("rect", { class: "track", x: LEFT, y: (LANE[0] + LANE[1]) / 2 - 2, width: right - LEFT, height: 4 }));
      inside.append(drawn("path", { class: "guide", d: `M${LEFT} ${(POSTERIOR[0] + POSTERIOR[1]) / 2}H${right}M${LEFT} ${(ODDS[0] + ODDS[1]) / 2}H${right}` }));
      inside.append(drawn("path", { class: "area", d: path(track.posterior, POSTERIOR, [0, 1], true) }));
      inside.append(drawn("path", { class: "evidence", d: path(track.odds, ODDS, [-6, 6], false) }));
      for (const region of track.regions) {
        if (region.end < from || region.start > to) continue;
        const left = x(region.start - 1), size = Math.max(3, x(region.end) - left);
        inside.append(drawn("rect", { class: region.extent === "whole" ? "whole" : region.verdict ? "provirus" : "unsure", x: left.toFixed(1), y: LANE[0], width: size.toFixed(1), height: LANE[1] - LANE[0], rx: 3 }));
        const visible = [Math.max(left, LEFT), Math.min(left + size, right)];
        const label = `${whole.format(region.start)}–${whole.format(region.end)}`;
        const words = [`${region.extent} ${label} (${region.posterior.toFixed(2)})`, label, `${Math.round((region.end - region.start + 1) / 1000)} kb`];
        const fitting = words.find((one) => one.length * 6.4 + 10 < visible[1] - visible[0]);
        if (fitting) inside.append(text((visible[0] + visible[1]) / 2, LANE[1] - 9, fitting, "on-region"));
      }
      svg.replaceChildren(clip, inside, outside);
      svg.setAttribute("aria-label", `Bases ${whole.format(Math.round(from) + 1)} to ${whole.format(Math.round(to))} of ${track.record}`);
      drawStrip();
    }

    // an overview of the record, with the part that the map shows
    function drawStrip() {
      const part = (at) => 1000 * (at / track.length);
      strip.replaceChildren(
        drawn("rect", { class: "track", x: 0, y: 5, width: 1000, height: 4 }),
        ...track.regions.map((region) =>
          drawn("rect", { class: region.extent === "whole" ? "whole" : region.verdict ? "provirus" : "unsure", x: part(region.start), y: 1, width: Math.max(2, part(region.end - region.start)), height: 12 })),
        drawn("rect", { class: "window", x: part(from), y: 0, width: Math.max(4, part(to - from)), height: 14 }),
      );
    }

    function look(low, high) {
      const span = Math.min(track.length, Math.max(Math.min(SHORTEST, track.length), high - low));
      const middle = (low + high) / 2;
      from = Math.min(track.length - span, Math.max(0, middle - span / 2));
      to = from + span;
      draw();
    }

    const zoom = (factor, around = (from + to) / 2) => look(around - (around - from) * factor, around + (to - around) * factor);
    const move = (share) => look(from + share * (to - from), to + share * (to - from));

    function step(by) {
      const middle = (from + to) / 2, slack = (to - from) / 1000;
      const middles = track.regions.map((region) => (region.start + region.end) / 2);
      const next = by > 0 ? middles.findIndex((one) => one > middle + slack) : middles.findLastIndex((one) => one < middle - slack);
      const region = track.regions[next < 0 ? (by > 0 ? 0 : middles.length - 1) : next];
      focusOn(region.start, region.end);
    }

    const focusOn = (start, end) => look(start - (end - start) / 2, end + (end - start) / 2);
    const actions = { "+": () => zoom(1 / 2), "=": () => zoom(1 / 2), "-": () => zoom(2), ArrowLeft: () => move(-1 / 4), ArrowRight: () => move(1 / 4), Home: () => look(0, track.length), n: () => step(1), p: () => step(-1) };
    svg.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    });
    place.querySelectorAll("button[data-key]").forEach((button) => button.addEventListener("click", actions[button.dataset.key]));
    // the wheel scrolls the page, unless the map was clicked or Ctrl is held
    svg.addEventListener("wheel", (event) => {
      if (document.activeElement !== svg && !event.ctrlKey) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / 800);
      else zoom(Math.exp(event.deltaY / 400), base(event));
    }, { passive: false });
    let drag = null;
    svg.addEventListener("pointerdown", (event) => { drag = { at: event.clientX, from, to }; svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointerup", () => { drag = null; });
    svg.addEventListener("pointercancel", () => { drag = null; });
    svg.addEventListener("pointermove", (event) => {
      if (drag) {
        const by = ((event.clientX - drag.at) / (width - LEFT - RIGHT)) * (drag.to - drag.from);
        look(drag.from - by, drag.to - by);
      }
      const at = base(event);
      if (at < from || at > to) return;
      const bin = binAt(at), odds = track.odds[bin], posterior = track.posterior[bin];
      hint.textContent = `base ${whole.format(Math.round(at) + 1)}` + (posterior === null ? "" : `: posterior ${posterior.toFixed(2)}`) + (odds === null || odds === undefined ? "" : `, log-odds ${odds.toFixed(1)}`);
    });
    strip.addEventListener("click", (event) => {
      const box = strip.getBoundingClientRect(), middle = ((event.clientX - box.left) / box.width) * track.length;
      look(middle - (to - from) / 2, middle + (to - from) / 2);
    });
    picker.addEventListener("change", () => show(Number(picker.value)));
    new ResizeObserver(() => { if (Math.abs(svg.clientWidth - width) > 1) draw(); }).observe(svg);

    function show(k, start, end) {
      track = tracks[k];
      picker.value = k;
      name.textContent = `${track.record}: ${whole.format(track.length)} bases, ${track.regions.length} ${track.regions.length === 1 ? "region" : "regions"}`;
      if (start === undefined) look(0, track.length);
      else focusOn(start, end);
    }

    for (const one of tracks) {
      one.posterior = one.posterior.map((value) => (value === null ? null : value / 100));
      one.odds = one.odds.map((value) => (value === null ? null : value / 2));
    }
    place.hidden = tracks.length === 0;
    if (tracks.length) show(0);
    return show;
  }

  // --- values under the cursor, on the charts

  function showCharts({ charts, columns, letters }, findRecord) {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const svg = figure.querySelector("svg.chart"), hint = figure.querySelector(".pointed");
      const chart = charts?.[figure.dataset.chart];
      const point = figure.id === "scatter" ? (columns ? ofRecords(columns, letters, svg) : null) : chart ? ofLines(chart, svg) : null;
      if (point === null) continue;
      const mark = svg.appendChild(drawn("path", { class: "mark" }));
      let hitIndex = -1;
      hint.hidden = false;
      const idle = figure.id === "scatter" ? "Point at a record to see its id; click to find it in the table." : "Point at the chart to see its values.";
      hint.textContent = idle;
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
        const hit = point(((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height);
        hitIndex = hit ? hit.i : -1;
        hint.textContent = hit ? hit.text : idle;
        mark.setAttribute("d", hit ? hit.mark : "");
      });
      svg.addEventListener("pointerleave", () => { hint.textContent = idle; mark.setAttribute("d", ""); });
      if (figure.id === "scatter") svg.addEventListener("click", () => { if (hitIndex >= 0) findRecord?.(hitIndex); });
    }
  }

  // the frame of a chart, and the values at its edges
  function frame(svg) {
    const [left, right, top, bottom] = svg.dataset.box.split(" ").map(Number);
    const [low, high] = svg.dataset.x.split(" ").map(Number);
    return { left, right, top, bottom, low, high };
  }

  function ofLines(chart, svg) {
    const { left, right, top, bottom, low, high } = frame(svg);
    const at = (value) => left + ((value - low) / (high - low || 1)) * (right - left);
    const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
    return (px) => {
      if (!chart.x.length) return null;
      const i = chart.x.reduce((best, value, k) => (Math.abs(at(value) - px) < Math.abs(at(chart.x[best]) - px) ? k : best), 0);
      const values = chart.series.filter(({ y }) => y[i] !== null).map(({ label, y }) => `${label} ${short(y[i])}`);
      return { i, text: `${chart.xLabel} ${short(chart.x[i])}: ${values.join("; ")}`, mark: `M${at(chart.x[i]).toFixed(1)} ${top}V${bottom}` };
    };
  }

  // the nearest record on the chart of scores by length
  function ofRecords({ length, score, record }, letters, svg) {
    const { left, right, top, bottom, low, high } = frame(svg);
    const odds = (p) => Math.max(-7, Math.min(7, Math.log(p / (1 - p))));
    const order = Uint32Array.from(score.keys()).filter((i) => score[i] !== null && length[i] > 0);
    const x = Float64Array.from(order, (i) => left + ((Math.log2(length[i]) - low) / (high - low)) * (right - left));
    const y = Float64Array.from(order, (i) => bottom - ((odds(score[i] / 1e6) + 7) / 14) * (bottom - top));
    return (px, py) => {
      let best = 144, nearest = -1;
      for (let k = 0; k < x.length; k++) {
        const away = (x[k] - px) ** 2 + (y[k] - py) ** 2;
        if (away < best) [best, nearest] = [away, k];
      }
      if (nearest < 0) return null;
      const i = order[nearest];
      return { i, text: `${record[i]}: ${whole.format(length[i])} ${letters}, score ${(score[i] / 1e6).toFixed(6)}`, mark: `M${(x[nearest] - 5).toFixed(1)} ${y[nearest].toFixed(1)}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0` };
    };
  }
})();
