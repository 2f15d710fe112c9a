/* The table of records and the charts under the cursor. Text of the user's reaches the page by
   textContent alone. Without this script the page has its summary, its tables and its drawings. */
"use strict";
(async () => {
  const ROW = 30, SPARE = 8; // pixels of a row; rows beyond the visible ones
  const data = await unpack(document.getElementById("data").textContent.trim());
  if (data === null) return;
  if (data.columns) {
    const { columns } = data;
    let place = 0;
    columns.index = columns.gap.map((gap) => (place += gap));
    const texts = (lines) => (place ? lines.split("\n") : []);
    Object.assign(columns, { record: texts(columns.record), note: texts(columns.note) });
  }
  const table = document.getElementById("table");
  if (table && data.columns) showTable(table, data);
  showCharts(data);
  document.documentElement.dataset.ready = "true";
  performance.mark("ready");

  async function unpack(text) {
    if (!text || !("DecompressionStream" in window)) return null;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // --- the table of records

  function showTable(place, { columns, files, statuses, letters }) {
    const n = columns.index.length;
    const whole = new Intl.NumberFormat("en");
    const counted = (name) => (i) => (columns[name][i] === null ? "" : whole.format(columns[name][i]));
    const scaled = (name, scale, digits) => (i) =>
      columns[name][i] === null ? "" : (columns[name][i] / scale).toFixed(digits);
    const call = (i) => (columns.score[i] === null ? "" : columns.viral[i] ? "virus" : "other");
    const has = (name) => columns[name].some((value) => value !== null && value !== 0 && value !== "");
    const shown = [
      { key: "index", label: "#", text: counted("index"), look: "n w-index" },
      { key: "record", label: "record", text: (i) => columns.record[i], look: "w-record" },
      { key: "file", label: "file", text: (i) => files[columns.file[i]], look: "w-file", only: files.length > 1 },
      { key: "length", label: letters, text: counted("length"), look: "n w-n" },
      { key: "status", label: "status", text: (i) => statuses[columns.status[i]], look: "w-status" },
      { key: "viral", label: "call", text: call, look: "w-call", only: has("score") },
      { key: "score", label: "score", text: scaled("score", 1e6, 6), look: "n w-n", only: has("score") },
      { key: "fdr", label: "fdr", text: scaled("fdr", 1e4, 4), look: "n w-n", only: has("fdr") },
      { key: "regions", label: "regions", text: counted("regions"), look: "n w-n", only: has("regions") },
      { key: "chunks", label: "chunks", text: counted("chunks"), look: "n w-n", only: has("chunks") },
      { key: "note", label: "note", text: (i) => columns.note[i], look: "w-note", only: has("note") },
    ].filter((column) => column.only !== false);
    const words = columns.record.map((id, i) => `${id}\n${columns.note[i]}`.toLowerCase());
    const names = files.map((name) => name.toLowerCase());
    const form = place.querySelector("form"), fields = form.elements;
    const scroller = place.querySelector(".rows"), count = place.querySelector(".count");
    const details = place.querySelector(".details");
    const orders = new Map(); // column -> places of all rows by rising values
    let sorted = { key: "index", falling: false }, rows = new Uint32Array(n), active = -1;

    // places by rising values; those without a value come last, in either direction
    function orderBy(key) {
      if (orders.has(key)) return orders.get(key);
      let values = columns[key];
      if (key === "file") values = values.map((i) => names[i]);
      if (key === "status") values = values.map((i) => statuses[i]);
      if (key === "viral") values = values.map((value, i) => (columns.score[i] === null ? null : value));
      const order = Uint32Array.from({ length: n }, (_, i) => i);
      const less = (a, b) => (values[a] < values[b] ? -1 : values[a] > values[b] ? 1 : a - b);
      const isEmpty = (i) => values[i] === null || values[i] === "";
      const full = order.filter((i) => !isEmpty(i)).sort(less);
      orders.set(key, { full, empty: order.filter(isEmpty) });
      return orders.get(key);
    }

    function select() {
      const text = fields.text.value.trim().toLowerCase();
      const ofFile = names.map((name) => text !== "" && name.includes(text));
      const number = (name) => (fields[name] && fields[name].value !== "" ? Number(fields[name].value) : null);
      const length = number("shortest"), score = number("lowest");
      const viral = number("call"), status = number("status"), file = number("file");
      const matches = (i) =>
        (text === "" || words[i].includes(text) || ofFile[columns.file[i]]) &&
        (length === null || columns.length[i] >= length) &&
        (score === null || (columns.score[i] !== null && columns.score[i] >= score * 1e6 - 0.5)) &&
        (viral === null || (columns.score[i] !== null && columns.viral[i] === viral)) &&
        (status === null || columns.status[i] === status) &&
        (file === null || columns.file[i] === file);
      const { full, empty } = orderBy(sorted.key);
      let k = 0;
      rows = new Uint32Array(n);
      const take = (i) => { if (matches(i)) rows[k++] = i; };
      if (sorted.falling) for (let j = full.length - 1; j >= 0; j--) take(full[j]);
      else full.forEach(take);
      empty.forEach(take);
      rows = rows.subarray(0, k);
      active = -1;
      details.hidden = true;
      count.textContent = k === n ? `${whole.format(n)} ${n === 1 ? "record" : "records"}` : `${whole.format(k)} of ${whole.format(n)} records`;
      grid.setAttribute("aria-rowcount", k + 1);
      scroller.scrollTop = 0;
      draw(true);
    }

    const heads = shown.map((column) => {
      const button = element("button", { type: "button", textContent: column.label });
      const head = element("th", { scope: "col", className: column.look }, button);
      button.addEventListener("click", () => {
        sorted = { key: column.key, falling: sorted.key === column.key && !sorted.falling };
        markSorted();
        select();
      });
      return head;
    });
    const markSorted = () =>
      heads.forEach((head, i) => {
        if (shown[i].key !== sorted.key) head.removeAttribute("aria-sort");
        else head.setAttribute("aria-sort", sorted.falling ? "descending" : "ascending");
      });
    const above = element("td", { colSpan: shown.length }), below = element("td", { colSpan: shown.length });
    const first = element("tr", { className: "space" }, above), last = element("tr", { className: "space" }, below);
    for (const space of [first, last]) space.setAttribute("aria-hidden", "true");
    const body = element("tbody", {}, first, last);
    const head = element("tr", {}, ...heads);
    head.setAttribute("aria-rowindex", 1);
    const grid = element("table", {}, element("thead", {}, head), body);
    grid.setAttribute("aria-label", "Records");
    scroller.append(grid);
    let drawn = [-1, -1];

    function draw(again) {
      const start = Math.max(0, Math.floor(scroller.scrollTop / ROW) - SPARE);
      const end = Math.min(rows.length, start + Math.ceil(scroller.clientHeight / ROW) + 2 * SPARE);
      if (!again && start === drawn[0] && end === drawn[1]) return;
      drawn = [start, end];
      above.style.height = `${start * ROW}px`;
      below.style.height = `${(rows.length - end) * ROW}px`;
      const made = [];
      for (let place = start; place < end; place++) made.push(line(place));
      const hadFocus = body.contains(document.activeElement), old = body.querySelectorAll("tr[data-place]");
      // the new rows come before the old ones go: the table never gets shorter, for a browser lays out
      // when what has the focus is removed, and would take the scrolling back to what is there just then
      first.after(...made);
      for (const row of old) row.remove();
      if (hadFocus) (body.querySelector('button[tabindex="0"]') ?? scroller).focus({ preventScroll: true });
    }

    function line(place) {
      const i = rows[place];
      const cells = shown.map((column) => {
        const text = column.text(i);
        if (column.key === "record") {
          const button = element("button", { type: "button", textContent: text, title: text });
          button.tabIndex = place === Math.max(active, 0) ? 0 : -1;
          return element("td", { className: column.look }, button);
        }
        const cell = element("td", { className: column.look, textContent: text });
        if (column.key === "note" || column.key === "file") cell.title = text;
        if (column.key === "viral" && text === "virus") cell.classList.add("virus");
        return cell;
      });
      const made = element("tr", { className: place === active ? "active" : "" }, ...cells);
      made.dataset.place = place;
      made.setAttribute("aria-rowindex", place + 2);
      return made;
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

    function tell(place) {
      const i = rows[place];
      const facts = shown.map((column) => [column.label, column.text(i)]).filter(([, text]) => text !== "");
      if (!shown.some((column) => column.key === "file")) facts.push(["file", files[columns.file[i]]]);
      details.replaceChildren(
        ...facts.map(([term, text]) =>
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
      tell(active);
    });
    statuses.forEach((name, i) => {
      if (columns.status.includes(i)) fields.status.append(element("option", { value: i, textContent: name }));
    });
    const offered = files.length <= 500 ? files : [];
    offered.forEach((name, i) => fields.file.append(element("option", { value: i, textContent: name })));
    form.querySelector(".of-files").hidden = offered.length < 2;
    form.addEventListener("input", select);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(select));
    const tsv = () => [
      shown.map((column) => column.label).join("\t"),
      ...Array.from(rows, (i) => shown.map((column) => column.text(i).replaceAll(",", column.look.startsWith("n ") ? "" : ",")).join("\t")),
    ].join("\n");
    fields.ids.addEventListener("click", (event) => copy(event.target, Array.from(rows, (i) => columns.record[i]).join("\n")));
    fields.rows.addEventListener("click", (event) => copy(event.target, tsv()));
    place.hidden = false;
    markSorted();
    select();
    place.find = (i) => {
      form.reset();
      fields.text.value = columns.record[i];
      select();
      place.scrollIntoView();
      const at = rows.indexOf(i);
      go(at);
      tell(at);
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

  // --- charts

  function showCharts({ charts, columns, cut, letters }) {
    const drawn = [];
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const chart = charts?.[figure.dataset.chart];
      if (chart) drawn.push([figure, (width) => lines(chart, width), chart]);
    }
    const scatter = document.getElementById("scatter");
    if (scatter && columns?.score.some((score) => score !== null))
      drawn.push([scatter, (width) => points(scatter, columns, cut, letters, width), null]);
    const redraw = () => {
      for (const item of drawn) {
        const [figure, make] = item;
        const width = Math.min(1024, figure.clientWidth);
        item.plot?.destroy();
        figure.classList.add("live");
        const { options, values } = make(width);
        item.plot = new uPlot(options, values, (plot, ready) => {
          figure.querySelector("figcaption").after(plot.root);
          ready();
        });
        const canvas = item.plot.root.querySelector("canvas");
        const text = figure.querySelector("svg.chart desc")?.textContent ?? "";
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", `${figure.querySelector("figcaption").textContent} ${text}`);
      }
    };
    redraw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let before = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { if (innerWidth !== before) { before = innerWidth; redraw(); } }, 150);
    });
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function axes(x, y, more = [{}, {}]) {
    const look = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    return [{ ...look, label: x, labelSize: 20, size: 34, ...more[0] }, { ...look, label: y, labelSize: 20, size: 62, ...more[1] }];
  }

  function lines(chart, width) {
    const names = ["blue", "vermillion", "green", "purple", "orange", "sky", "grey"];
    const dashes = [[], [7, 3], [2, 3], [9, 3, 2, 3], [], [7, 3], [2, 3]];
    const series = chart.series.map(({ label }, i) => ({
      label, stroke: colour(names[i % 7]), dash: dashes[i % 7], width: 2, spanGaps: true,
      points: { show: chart.x.length < 40 },
      paths: chart.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    const [low, high] = chart.yRange ?? [0, null];
    return {
      options: {
        width, height: 300, series: [{ label: chart.xLabel }, ...series], axes: axes(chart.xLabel, chart.yLabel),
        scales: { x: { time: false }, y: { range: (_, min, max) => [chart.yRange ? low : Math.min(0, min), high ?? (max || 1) * 1.05] } },
      },
      values: [chart.x, ...chart.series.map(({ y }) => y)],
    };
  }

  // every record of the table as a point, over logarithms of length and log-odds of score
  function points(figure, columns, cut, letters, width) {
    const odds = (p) => Math.max(-7, Math.min(7, Math.log(p / (1 - p))));
    const order = Uint32Array.from(columns.score.keys()).filter((i) => columns.score[i] !== null && columns.length[i] > 0);
    order.sort((a, b) => columns.length[a] - columns.length[b] || a - b);
    const x = Array.from(order, (i) => Math.log10(columns.length[i]));
    const y = Array.from(order, (i) => odds(columns.score[i] / 1e6));
    const side = (viral) => y.map((value, k) => (columns.viral[order[k]] === viral ? value : null));
    const low = x[0] - 0.05, high = x[x.length - 1] + 0.05;
    const size = order.length > 20000 ? 2 : order.length > 1000 ? 3 : 5;
    const dots = (name) => (plot, index) => {
      const { ctx, data } = plot, half = (size * devicePixelRatio) / 2;
      ctx.save();
      ctx.fillStyle = colour(name);
      ctx.globalAlpha = order.length > 5000 ? 0.45 : 0.85;
      ctx.beginPath();
      for (let k = 0; k < x.length; k++) {
        if (data[index][k] === null) continue;
        const left = plot.valToPos(x[k], "x", true), top = plot.valToPos(data[index][k], "y", true);
        ctx.rect(left - half, top - half, 2 * half, 2 * half);
      }
      ctx.fill();
      ctx.restore();
      return null;
    };
    const drawCut = (plot) => {
      if (!cut.length) return;
      const { ctx } = plot, at = (n, score) => [plot.valToPos(Math.log10(n), "x", true), plot.valToPos(odds(score), "y", true)];
      const ends = [[10 ** low, cut[0][1]], ...cut, [10 ** high, cut[cut.length - 1][1]]];
      ctx.save();
      ctx.beginPath();
      ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
      ctx.clip();
      ctx.strokeStyle = colour("cut");
      ctx.lineWidth = 1.6 * devicePixelRatio;
      ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ends.filter(([n], k) => k === 0 ? n < cut[0][0] : k === ends.length - 1 ? n > cut[cut.length - 1][0] : true)
        .forEach(([n, score], k) => (k ? ctx.lineTo(...at(n, score)) : ctx.moveTo(...at(n, score))));
      ctx.stroke();
      ctx.restore();
    };
    const told = figure.querySelector(".pointed");
    told.hidden = false;
    let pointed = -1;
    const point = (plot) => {
      const { left, top } = plot.cursor;
      pointed = -1;
      if (left >= 0) {
        let best = 12 ** 2;
        const from = plot.valToIdx(plot.posToVal(left - 12, "x")), to = plot.valToIdx(plot.posToVal(left + 12, "x"));
        for (let k = from; k <= to; k++) {
          const away = (plot.valToPos(x[k], "x") - left) ** 2 + (plot.valToPos(y[k], "y") - top) ** 2;
          if (away < best) [best, pointed] = [away, order[k]];
        }
      }
      told.textContent = pointed < 0 ? "Point at a record to see its id; click to find it in the table."
        : `${columns.record[pointed]}: ${columns.length[pointed].toLocaleString("en")} ${letters}, score ${(columns.score[pointed] / 1e6).toFixed(6)}`;
    };
    const scores = [0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999];
    const lengths = [];
    for (let power = 0; power < 10; power++)
      for (const m of high - low > 3 ? [1] : high - low > 0.7 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9]) {
        const n = m * 10 ** power;
        if (Math.log10(n) >= low && Math.log10(n) <= high) lengths.push(n);
      }
    return {
      options: {
        width, height: 380, legend: { show: false },
        cursor: { points: { show: false }, drag: { x: false, y: false }, bind: { click: (_, __, handler) => (event) => { handler(event); if (pointed >= 0) document.getElementById("table").find(pointed); return null; } } },
        scales: { x: { time: false, range: [low, high] }, y: { range: [-7.3, 7.3] } },
        series: [{}, { label: "other", paths: dots("blue"), points: { show: false } }, { label: "virus", paths: dots("vermillion"), points: { show: false } }],
        axes: axes(`length in ${letters}`, "score", [
          { splits: () => lengths.map(Math.log10), values: () => lengths.map((n) => n.toLocaleString("en")) },
          { splits: () => scores.map(odds), values: () => scores.map(String) },
        ]),
        hooks: { draw: [drawCut], setCursor: [point] },
      },
      values: [x, side(0), side(1)],
    };
  }
})();
