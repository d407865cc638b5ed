"""What the timeline does in the browser, as JavaScript, and what the mouse is told, as HTML.

Names that stand free in a script (``plot``, ``boxes``) are given to it by ``timeline.py``. This
module knows no Bokeh.
"""

from __future__ import annotations

__all__ = ["LABELS", "SHOW_MEMORY", "SHOW_PATH", "TOOLTIP"]

TOOLTIP = """
<div class="told" style="font:12px system-ui,sans-serif;color:#1c2733;max-width:340px">
  <div style="margin-bottom:3px"><b style="font-size:13px">@action</b>
    <span style="color:#66727f">@kind</span></div>
  <div>rank <b>@rank</b> &middot; stage <b>@stage</b> &middot; microbatch <b>@microbatch</b></div>
  <div>start <b>@left{0.[0000]}</b> &middot; end <b>@right{0.[0000]}</b>
    &middot; lasts <b>@lasts{0.[0000]}</b></div>
  <div>waited for <b>@waited</b></div>
  <div>@block</div>
  <div style="color:#c2255c">@beside</div>
</div>
"""

# Boxes get the number of their label where they are wide enough to hold it, and its letter, the
# op's, too, where most have room for it. That depends on the zoom, so that it is decided in the
# browser. White edges would wash out boxes of a few pixels, and frames would hide them.
LABELS = """
const lane_height = plot.inner_height / Math.abs(y.end - y.start)
const per_px = (x.end - x.start) / plot.inner_width
const d = boxes.data
const n = d.left.length
let total = 0, longest = 0
for (let i = 0; i < n; i++) {
  total += d.lasts[i]
  longest = Math.max(longest, d.label[i].length)
}
const width = (letters) => letters * 6.4 + 3
const usual_px = n > 0 ? total / n / per_px : 0
const with_letter = usual_px > width(longest)
const found = {x: [], y: [], text: [], ink: []}
if (plot.inner_width > 0 && lane_height * 0.4 >= 8) {
  const top = Math.min(y.start, y.end), foot = Math.max(y.start, y.end)
  const highs = d[box.top.field], lows = d[box.bottom.field]
  const pale = box.fill_alpha.field == "alpha"
  for (let i = 0; i < n && found.x.length < 3000; i++) {
    const label = d.label[i], number = label.slice(1)
    if (label.length == 0 || d.right[i] < x.start || d.left[i] > x.end) continue
    if (lows[i] < top || highs[i] > foot) continue
    const px = (d.right[i] - d.left[i]) / per_px
    if (px < width(number.length)) continue
    const lettered = with_letter && px >= width(label.length)
    const left = Math.max(d.left[i], x.start), right = Math.min(d.right[i], x.end)
    found.x.push((left + right) / 2)
    found.y.push((highs[i] + lows[i]) / 2)
    found.text.push(lettered ? label : number)
    found.ink.push(pale && d.alpha[i] < 1 ? "#8793a0" : d.ink[i])
  }
}
labels.data = found
const edge = n == 0 || usual_px > 6 ? 0.6 : 0
if (box.line_width.value != edge) {
  box.line_width = {value: edge}
  path.line_width = {value: edge > 0 ? 2 : 0}
  frame.line_width = {value: edge > 0 ? 1.6 : 0}
}
"""

SHOW_MEMORY = """
memory.visible = this.active
for (const glyph of [box, path, frame]) {
  glyph.top = {field: this.active ? "top" : "top_alone"}
  glyph.bottom = {field: this.active ? "foot" : "foot_alone"}
}
"""

# All else pales.
SHOW_PATH = """
boxes.visible = lines.visible = this.active
box.fill_alpha = this.active ? {field: "alpha"} : {value: 1}
frame.line_alpha = {value: this.active ? 0.25 : 1}
"""
