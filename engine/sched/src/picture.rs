//! Plans as pictures: a lane for each device, a box for each split, an arrow for each copy.

use crate::explain::human_bytes;
use crate::plan::Plan;
use std::fmt::Write;

const LANE: usize = 92;
const LEFT: usize = 150;
const BOX: usize = 128;
const GAP: usize = 46;
const COLORS: [&str; 8] = [
    "#4f7cac", "#c0763c", "#5f9e6e", "#a05a7f", "#7d6bb0", "#b0a04a", "#4aa3a3", "#8c8c8c",
];

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

impl Plan {
    /// Returns the splits as an SVG document: time from left to right, one lane for each device,
    /// arrows for copies. Titles of boxes and arrows contain details.
    pub fn to_svg(&self) -> String {
        let splits = self.splits();
        let width = LEFT + splits.len().max(1) * (BOX + GAP) + GAP;
        let height = self.devices().len() * LANE + 40;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <style>text{{fill:#222}} .lane{{fill:#f4f4f2}} \
             .copy{{stroke:#555;stroke-width:1.6;fill:none;marker-end:url(#arrow)}} \
             @media (prefers-color-scheme:dark){{text{{fill:#ddd}} .lane{{fill:#2a2a2a}} \
             .copy{{stroke:#bbb}}}}</style>\n\
             <defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" \
             markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\">\
             <path d=\"M0 0L8 4L0 8z\" fill=\"#777\"/></marker></defs>\n"
        );
        for (i, device) in self.devices().iter().enumerate() {
            let y = 20 + i * LANE;
            let memory = self.memory().size(self.devices().memory_of(i));
            let _ = writeln!(
                svg,
                "<rect class=\"lane\" x=\"4\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"6\"/>\
                 <text x=\"14\" y=\"{}\" font-weight=\"bold\">{}</text>\
                 <text x=\"14\" y=\"{}\" font-size=\"10\">{}</text>\
                 <text x=\"14\" y=\"{}\" font-size=\"10\">{} memory: {}</text>",
                width - 8,
                LANE - 10,
                y + 28,
                escape(device.name()),
                y + 44,
                device.kind(),
                y + 58,
                escape(device.buffer_type().name()),
                human_bytes(memory)
            );
        }
        let x_of = |number: usize| LEFT + number * (BOX + GAP);
        let y_of = |device: usize| 20 + device * LANE + 14;
        for (number, split) in splits.iter().enumerate() {
            let (x, y) = (x_of(number), y_of(split.device));
            let first = split.nodes.first().map(|&id| self.graph().tensor(id));
            let last = split.nodes.last().map(|&id| self.graph().tensor(id));
            let names = |t: Option<&samite_core::Tensor>| {
                t.map_or_else(String::new, |t| {
                    if t.name.is_empty() {
                        t.op.name().to_owned()
                    } else {
                        t.name.to_string()
                    }
                })
            };
            let (first, last) = (names(first), names(last));
            let short = |s: &str| s.chars().take(20).collect::<String>();
            let _ = writeln!(
                svg,
                "<g><title>split {number} on {}: {} operations, {} … {}</title>\
                 <rect x=\"{x}\" y=\"{y}\" width=\"{BOX}\" height=\"54\" rx=\"5\" fill=\"{}\" \
                 fill-opacity=\"0.85\"/>\
                 <text x=\"{}\" y=\"{}\" style=\"fill:#fff\" font-weight=\"bold\">split {number} \
                 · {} ops</text>\
                 <text x=\"{}\" y=\"{}\" style=\"fill:#fff\" font-size=\"10\">{}</text>\
                 <text x=\"{}\" y=\"{}\" style=\"fill:#fff\" font-size=\"10\">… {}</text></g>",
                escape(self.devices().get(split.device).name()),
                split.nodes.len(),
                escape(&first),
                escape(&last),
                COLORS[split.device % COLORS.len()],
                x + 8,
                y + 18,
                split.nodes.len(),
                x + 8,
                y + 33,
                escape(&short(&first)),
                x + 8,
                y + 46,
                escape(&short(&last)),
            );
            for (i, &c) in split.copies.iter().enumerate() {
                let copy = &self.copies()[c];
                let from =
                    self.placement().devices[copy.from.index()].unwrap_or(self.devices().last());
                // From the split that computed it, or from the start of the lane for leaves.
                let source = splits[..number].iter().rposition(|s| s.device == from);
                let start_x = source.map_or(LEFT - 16, |s| x_of(s) + BOX);
                let (start_y, end_y) = (y_of(from) + 27, y + 12 + (i * 8).min(32));
                let middle = start_x.max(x.saturating_sub(GAP / 2));
                let _ = writeln!(
                    svg,
                    "<path class=\"copy\" d=\"M{start_x} {start_y} C{middle} {start_y} {} {end_y} {x} {end_y}\"><title>{} ({})</title></path>",
                    x.saturating_sub(GAP / 2),
                    escape(&self.graph().tensor(copy.from).name),
                    human_bytes(copy.bytes)
                );
            }
        }
        svg.push_str("</svg>\n");
        svg
    }
}
