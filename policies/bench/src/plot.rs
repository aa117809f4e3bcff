//! Line charts as SVG.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// Left, right, top, bottom.
const MARGINS: [f64; 4] = [56.0, 250.0, 40.0, 48.0];
/// Told apart by people who see few colours, too (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000"];

/// A chart.
#[derive(Debug)]
pub struct Chart<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below and left of it.
    pub axes: [&'a str; 2],
    /// Ticks of the axes, first and last of each its ends.
    pub ticks: [Vec<f64>; 2],
    /// Axes in logarithms.
    pub logarithmic: bool,
    /// Names and points.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Chart<'_> {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let [left, right, top, bottom] = MARGINS;
        let (wide, high) = (WIDTH - left - right, HEIGHT - top - bottom);
        let part = |axis: usize, value: f64| {
            let ticks = &self.ticks[axis];
            let (first, last) = (ticks.first().copied().unwrap_or(0.0), ticks.last().copied().unwrap_or(1.0));
            let scale = |value: f64| if self.logarithmic { value.log10() } else { value };
            (scale(value) - scale(first)) / (scale(last) - scale(first))
        };
        let x = |value: f64| left + part(0, value) * wide;
        let y = |value: f64| top + (1.0 - part(1, value)) * high;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let mut text = |x: f64, y: f64, more: &str, text: &str| {
            let text = text.replace('&', "&amp;").replace('<', "&lt;");
            _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {more}>{text}</text>");
        };
        text(left, 24.0, "font-size=\"15\"", self.title);
        text(left + wide / 2.0, HEIGHT - 10.0, "text-anchor=\"middle\"", self.axes[0]);
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 14 {:.1})\"", top + high / 2.0);
        text(14.0, top + high / 2.0, &turned, self.axes[1]);
        for &tick in &self.ticks[0] {
            text(x(tick), top + high + 16.0, "text-anchor=\"middle\"", &tick.to_string());
        }
        for &tick in &self.ticks[1] {
            text(left - 6.0, y(tick) + 4.0, "text-anchor=\"end\"", &tick.to_string());
        }
        for (at, (name, _)) in self.lines.iter().enumerate() {
            text(left + wide + 38.0, top + 14.0 + 20.0 * at as f64, "", name);
        }
        for &tick in &self.ticks[1] {
            let (y, end) = (y(tick), left + wide);
            _ = writeln!(svg, "<path d=\"M{left} {y:.1}H{end:.1}\" stroke=\"#ddd\"/>");
        }
        for (at, (_, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let points: Vec<String> =
                points.iter().map(|&(a, b)| format!("{:.1},{:.1}", x(a), y(b))).collect();
            let line = format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"");
            _ = writeln!(svg, "<polyline points=\"{}\" {line}/>", points.join(" "));
            let (from, beside) = (left + wide + 12.0, top + 10.0 + 20.0 * at as f64);
            _ = writeln!(svg, "<path d=\"M{from:.1} {beside:.1}h20\" {line}/>");
        }
        svg + "</svg>\n"
    }
}
