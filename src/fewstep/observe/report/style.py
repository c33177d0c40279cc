"""The look of the page, and the few lines of script that show values under the pointer."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f8f8f6; --card: #ffffff; --edge: #e4e3de; --ink: #1b1c1e; --soft: #63656b; --faint: #8b8d93;
  --rule: #eeede9;
  --accent: #2459b8; --alert: #a63d00; --alert-card: #fff6ee; --alert-edge: #f2d6bf; --code: #f4f3f0;
  --bar: #9dbbec; --tint-row: #f6f8fd;
  --c0: #2a62c9; --c1: #c8590f; --c2: #0d7f78; --c3: #7c52c6; --c4: #b6356c; --c5: #6d7a12; --c6: #526a80;
  --c7: #8d5b2c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131416; --card: #1a1c1f; --edge: #2c2f34; --ink: #e8e8e6; --soft: #a3a6ad; --faint: #7d8088;
    --rule: #25282c;
    --accent: #8ab2ff; --alert: #ffb27a; --alert-card: #2a2019; --alert-edge: #4d3624; --code: #202327;
    --bar: #45659c; --tint-row: #1c212a;
    --c0: #7aa7ff; --c1: #f59a56; --c2: #4cc4ba; --c3: #b493f5; --c4: #f07fae; --c5: #bcc957; --c6: #9db6cd;
    --c7: #d3a373;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink); font-feature-settings: "tnum", "kern";
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 44px 24px 64px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 20px; letter-spacing: -0.01em; margin: 0 0 14px; }
h3 { font-size: 15px; font-weight: 600; margin: 26px 0 10px; }
h3::first-letter { text-transform: uppercase; }
h3 small { font-weight: 400; font-size: 13px; color: var(--soft); margin-left: 8px; }
p { margin: 0; }
.over { font-size: 12px; letter-spacing: 0.08em; text-transform: uppercase; color: var(--soft); margin-bottom: 6px; }
.lead { font-size: 17px; color: var(--soft); max-width: 46em; }
section { margin-top: 52px; scroll-margin-top: 16px; }
section > .lead { font-size: 14px; margin: -10px 0 16px; max-width: 70em; }
.lead.facts { font-size: 14px; margin-top: 4px; }
nav { margin-top: 22px; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
nav a { color: var(--accent); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin-top: 28px; }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px; }
.tile .value { font-size: 25px; line-height: 1.2; font-weight: 600; letter-spacing: -0.02em; margin: 2px 0; }
.tile .what, .tile .more { font-size: 12.5px; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 14px; }
figure { margin: 0; }
.chart { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 13px 14px 8px;
  position: relative; }
.full { grid-column: span 6; } .half { grid-column: span 3; } .third { grid-column: span 2; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 2px 14px;
  margin-bottom: 6px; font-size: 13.5px; }
.title { font-weight: 600; }
.title::first-letter { text-transform: uppercase; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--soft); }
.key i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; background: var(--c); margin-right: 6px;
  vertical-align: 3px; }
.key b { color: var(--ink); font-weight: 600; }
.note { font-size: 12.5px; line-height: 1.45; color: var(--soft); padding: 2px 0 6px; }
.empty { font-size: 13.5px; color: var(--soft); padding: 14px 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11px; fill: var(--faint); }
.rule { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.band { fill: var(--c); opacity: 0.16; }
.dot { fill: var(--card); stroke: var(--c); stroke-width: 1.6; }
.broken { fill: none; stroke: var(--alert); stroke-width: 1.5; }
.hover { visibility: hidden; }
.hover line { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 3; }
.hover circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--page); font-size: 12px;
  line-height: 1.45;
  padding: 5px 9px; border-radius: 6px; white-space: pre; visibility: hidden; z-index: 1; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 8px 14px; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 12.5px; }
tbody th { font-weight: 600; }
th:first-child { text-align: left; }
td.best { font-weight: 700; color: var(--accent); }
td.bar { background: linear-gradient(var(--bar), var(--bar)) no-repeat right 14px bottom 4px;
  background-size: calc(var(--share) * 0.8) 3px; }
tr.student { background: var(--tint-row); }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts th { font-weight: 500; color: var(--soft); width: 14em; vertical-align: top; white-space: normal; }
table.facts tr:first-child > * { border-top: 0; }
.grids { display: grid; grid-template-columns: repeat(auto-fill, minmax(172px, 1fr)); gap: 16px 14px; }
.picture img { display: block; width: 100%; height: auto; border-radius: 8px; border: 1px solid var(--edge);
  background: #000; }
.picture img.small { image-rendering: pixelated; }
.picture figcaption { margin: 6px 0 0; font-size: 12.5px; color: var(--soft); }
.comparison { margin-top: 14px; }
ul.log { list-style: none; margin: 0; padding: 4px 16px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; font-size: 14px; }
ul.log li { padding: 8px 0; border-top: 1px solid var(--rule); display: grid;
  grid-template-columns: 16em 1fr; gap: 14px; }
ul.log li:first-child { border-top: 0; }
ul.log time { color: var(--soft); font-size: 12.5px; line-height: 21px; }
ul.warnings { background: var(--alert-card); border-color: var(--alert-edge); }
ul.warnings li { border-color: var(--alert-edge); }
ul.warnings b { color: var(--alert); font-weight: 600; }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
summary { cursor: pointer; padding: 12px 16px; font-size: 14px; font-weight: 600; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto; border-top: 1px solid var(--rule); background: var(--code);
  border-radius: 0 0 10px 10px; font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 52px; font-size: 12.5px; color: var(--faint); }
@media (max-width: 980px) { .third { grid-column: span 3; } }
@media (max-width: 760px) {
  main { padding: 28px 14px 48px; }
  h1 { font-size: 27px; }
  .charts .chart { grid-column: 1 / -1; }
  .full { overflow-x: auto; }
  .full svg { min-width: 720px; }
  .tiles, .grids { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  ul.log li { grid-template-columns: 1fr; gap: 0; }
}
@media print { .chart, .tile, tr, .picture { break-inside: avoid; } nav { display: none; } }
"""

SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-lines]')) {
  const lines = JSON.parse(svg.dataset.lines);
  const hover = svg.querySelector('.hover'), rule = hover.querySelector('line');
  const dots = hover.querySelectorAll('circle'), figure = svg.parentElement, view = svg.viewBox.baseVal;
  const tip = figure.appendChild(document.createElement('div'));
  tip.className = 'tip';
  const near = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), scale = view.width / box.width, x = (event.clientX - box.left) * scale;
    const middle = near(lines.flatMap(line => line.points), x), words = [middle[2]];
    dots.forEach(dot => dot.setAttribute('visibility', 'hidden'));
    lines.forEach((line, place) => {
      const point = near(line.points, middle[0]);
      if (Math.abs(point[0] - middle[0]) > 12) return;
      dots[place].setAttribute('visibility', 'inherit');
      dots[place].setAttribute('cx', point[0]);
      dots[place].setAttribute('cy', point[1]);
      words.push((line.label && line.label + ': ') + point[3] + (point[2] === middle[2] ? '' : ' at ' + point[2]));
    });
    for (const end of ['x1', 'x2']) rule.setAttribute(end, middle[0]);
    rule.setAttribute('y1', 10);
    rule.setAttribute('y2', view.height - 26);
    hover.style.visibility = tip.style.visibility = 'visible';
    tip.textContent = words.join('\\n');
    const left = svg.offsetLeft || box.left - figure.getBoundingClientRect().left, at = left + middle[0] / scale;
    tip.style.left = (at > box.width * 0.6 ? at - tip.offsetWidth - 12 : at + 12) + 'px';
    tip.style.top = (box.top - figure.getBoundingClientRect().top + 14) + 'px';
  });
  svg.addEventListener('pointerleave', () => { hover.style.visibility = tip.style.visibility = 'hidden'; });
}
"""
