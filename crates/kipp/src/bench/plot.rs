//! Pictures of records: rates against context and against batch, as SVG that is legible on light and on
//! dark pages.

use std::fmt::Write;

use super::record::{Entry, Record};

/// Size of one panel with its labels.
const PANEL: (f64, f64) = (400.0, 300.0);
/// Room around a panel's axes: left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (62.0, 34.0, 16.0, 46.0);
const COLOURS: [&str; 6] = ["#3b82c4", "#d9772b", "#3f9e5b", "#b0569c", "#a08a1e", "#c74f4f"];

const STYLE: &str = "\
<style>
.paper{fill:#ffffff}.ink{fill:#24292f}.axis{stroke:#57606a}.grid{stroke:#d0d7de}
text{font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.axis{stroke:#9198a1}.grid{stroke:#30363d}}
</style>
";

/// One line of a panel.
struct Series {
    label: String,
    colour: &'static str,
    /// x and tokens a second, ascending in x.
    points: Vec<(f64, f64)>,
}

/// One pair of axes.
struct Panel {
    title: &'static str,
    x_label: &'static str,
    /// Whether equal steps of x are equal factors.
    factors: bool,
    series: Vec<Series>,
}

/// The picture; `None` if no record has two points for any panel.
pub fn draw(records: &[(String, Record)]) -> Option<String> {
    let alone = |e: &Entry| e.generates() && e.sequences == 1;
    let depth = |e: &Entry| e.depth as f64;
    let panels = [
        Panel {
            title: "generating, one sequence",
            x_label: "positions in the cache",
            factors: false,
            series: series(records, alone, |e| format!("tg{}", e.tokens), depth),
        },
        Panel {
            title: "reading a prompt",
            x_label: "positions in the cache",
            factors: false,
            series: series(records, |e| !e.generates(), |e| format!("pp{}", e.tokens), depth),
        },
        Panel {
            title: "generating, all sequences together",
            x_label: "sequences",
            factors: true,
            series: series(
                records,
                Entry::generates,
                |e| format!("tg{} at {}", e.tokens, e.depth),
                |e| e.sequences as f64,
            ),
        },
    ];
    let panels: Vec<&Panel> = panels.iter().filter(|panel| !panel.series.is_empty()).collect();
    if panels.is_empty() {
        return None;
    }
    let legend = panels.iter().map(|panel| panel.series.len()).max().unwrap_or(0) as f64 * 18.0;
    let (width, height) = (PANEL.0 * panels.len() as f64, PANEL.1 + legend + 8.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>kipp bench: tokens a second</title>\n{STYLE}\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n"
    );
    for (at, panel) in panels.iter().enumerate() {
        panel.draw(at as f64 * PANEL.0, &mut svg);
    }
    svg += "</svg>\n";
    Some(svg)
}

/// The lines of one panel: the entries that `wanted` keeps, one line for each record and each `line`; of
/// those only the ones that have two points.
fn series(
    records: &[(String, Record)],
    wanted: impl Fn(&Entry) -> bool,
    line: impl Fn(&Entry) -> String,
    x: impl Fn(&Entry) -> f64,
) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for (name, record) in records {
        let first = all.len();
        for entry in record.results.iter().filter(|entry| wanted(entry)) {
            let label = format!("{name} {}", line(entry)).trim().to_owned();
            let point = (x(entry), entry.rates()[1]);
            match all[first..].iter_mut().find(|series| series.label == label) {
                Some(series) => series.points.push(point),
                None => all.push(Series { label, colour: "", points: vec![point] }),
            }
        }
    }
    for series in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        series.points.dedup_by_key(|point| point.0);
    }
    all.retain(|series| series.points.len() > 1);
    all.truncate(COLOURS.len());
    for (series, colour) in all.iter_mut().zip(COLOURS) {
        series.colour = colour;
    }
    all
}

impl Panel {
    fn draw(&self, left: f64, svg: &mut String) {
        let (ml, mt, mr, mb) = MARGIN;
        let (x0, x1) = (left + ml, left + PANEL.0 - mr);
        let (y0, y1) = (PANEL.1 - mb, mt);
        let points = || self.series.iter().flat_map(|series| &series.points);
        let top = nice_above(points().map(|point| point.1).fold(0.0, f64::max));
        let scaled = |x: f64| if self.factors { x.log2() } else { x };
        let low = points().map(|p| scaled(p.0)).fold(f64::INFINITY, f64::min);
        let high = points().map(|p| scaled(p.0)).fold(f64::NEG_INFINITY, f64::max);
        let px = |x: f64| x0 + (scaled(x) - low) / (high - low) * (x1 - x0);
        let py = |y: f64| y0 + y / top * (y1 - y0);

        // Writing to a string cannot fail, here and below.
        let text = |svg: &mut String, x: f64, y: f64, how: &str, what: &str| {
            let _ = writeln!(
                svg,
                "<text class=\"ink\" x=\"{x:.1}\" y=\"{y:.1}\" {how}>{}</text>",
                escape(what)
            );
        };
        text(
            svg,
            (x0 + x1) / 2.0,
            20.0,
            "text-anchor=\"middle\" style=\"font-weight:600\"",
            self.title,
        );
        for step in 0..=4 {
            let value = top * f64::from(step) / 4.0;
            let y = py(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{x0:.1}\" y1=\"{y:.1}\" x2=\"{x1:.1}\" y2=\"{y:.1}\"/>"
            );
            text(svg, x0 - 6.0, y + 4.0, "text-anchor=\"end\"", &number(value));
        }
        let turned = format!(
            "text-anchor=\"middle\" transform=\"rotate(-90 {:.1} {:.1})\"",
            left + 14.0,
            (y0 + y1) / 2.0
        );
        text(svg, left + 14.0, (y0 + y1) / 2.0, &turned, "tokens/s");
        let mut marks: Vec<f64> = points().map(|point| point.0).collect();
        marks.sort_by(f64::total_cmp);
        marks.dedup();
        let mut free = f64::NEG_INFINITY;
        for x in marks {
            let label = number(x);
            let half = 4.0 * label.len() as f64;
            // A mark whose label would run into the one before has none.
            if px(x) - half > free {
                text(svg, px(x), y0 + 16.0, "text-anchor=\"middle\"", &label);
                free = px(x) + half;
            }
            let _ = writeln!(
                svg,
                "<line class=\"axis\" x1=\"{0:.1}\" y1=\"{y0:.1}\" x2=\"{0:.1}\" y2=\"{1:.1}\"/>",
                px(x),
                y0 + 4.0
            );
        }
        text(svg, (x0 + x1) / 2.0, y0 + 34.0, "text-anchor=\"middle\"", self.x_label);
        let _ = writeln!(
            svg,
            "<path class=\"axis\" fill=\"none\" d=\"M{x0:.1} {y1:.1}V{y0:.1}H{x1:.1}\"/>"
        );
        for (at, series) in self.series.iter().enumerate() {
            let colour = series.colour;
            let at_point = |&(x, y): &(f64, f64)| format!("{:.1},{:.1}", px(x), py(y));
            let line: Vec<String> = series.points.iter().map(at_point).collect();
            let _ = writeln!(
                svg,
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
                line.join(" ")
            );
            for &(x, y) in &series.points {
                let (x, y) = (px(x), py(y));
                let _ = writeln!(
                    svg,
                    "<circle fill=\"{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>"
                );
            }
            let y = PANEL.1 + 18.0 * at as f64;
            let _ = writeln!(
                svg,
                "<rect fill=\"{colour}\" x=\"{x0:.1}\" y=\"{:.1}\" width=\"18\" height=\"4\"/>",
                y + 6.0
            );
            text(svg, x0 + 26.0, y + 12.0, "", &series.label);
        }
    }
}

/// The smallest of 1, 2, 2.5, 4, 5, 8 and 10 times a power of ten that is not below `value`.
fn nice_above(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let factors = [1.0, 2.0, 2.5, 4.0, 5.0, 8.0, 10.0];
    factors.map(|factor| factor * power).into_iter().find(|&nice| nice >= value).unwrap_or(value)
}

/// A label of an axis, short.
fn number(value: f64) -> String {
    match value {
        _ if value >= 10_000.0 => format!("{}k", value / 1000.0),
        _ if value >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
