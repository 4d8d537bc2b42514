//! The loss of a run as a picture: for a terminal, and as SVG.
//!
//! Both are made from the run's log, so that they show what it holds.

use serde_json::Value;
use std::fmt::Write;

/// Losses by update: of batches, and of what is held out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Losses of batches.
    pub training: Vec<(f64, f64)>,
    /// Losses of held-out examples.
    pub held_out: Vec<(f64, f64)>,
}

/// The plane that a curve is drawn on.
struct Frame {
    x: [f64; 2],
    y: [f64; 2],
}

impl Frame {
    /// Where a point lies, from 0 to 1 to the right and upwards.
    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        ((x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0]))
    }
}

/// Losses in one line of at most `columns` columns, each the mean of neighbouring losses: `█▆▄▃▂▁`.
pub fn sparks(losses: &[f64], columns: usize) -> String {
    const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = columns.min(losses.len());
    let mean = |column: usize| {
        let [from, to] = [column, column + 1].map(|at| at * losses.len() / columns);
        losses[from..to].iter().sum::<f64>() / (to - from) as f64
    };
    let means: Vec<f64> = (0..columns).map(mean).collect();
    let least = means.iter().copied().fold(f64::INFINITY, f64::min);
    let range = means.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    let height = |mean: &f64| match range > 0.0 {
        true => HEIGHTS[((mean - least) / range * 7.0).round() as usize],
        false => HEIGHTS[0],
    };
    means.iter().map(height).collect()
}

impl Curve {
    /// The losses of a log; lines that say something else are passed over.
    pub fn of_log(log: &str) -> Curve {
        let mut curve = Curve::default();
        for line in log.lines() {
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            let Some(step) = line["step"].as_f64() else { continue };
            curve.training.extend(line["loss"].as_f64().map(|loss| (step, loss)));
            curve.held_out.extend(line["held_out"].as_f64().map(|loss| (step, loss)));
        }
        curve
    }

    fn points(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.training.iter().chain(&self.held_out)
    }

    /// Room around all points; `None` where there are not two.
    fn frame(&self) -> Option<Frame> {
        let range = |of: &dyn Fn(&(f64, f64)) -> f64| {
            let least = self.points().map(of).fold(f64::INFINITY, f64::min);
            [least, self.points().map(of).fold(f64::NEG_INFINITY, f64::max)]
        };
        let (x, mut y) = (range(&|p| p.0), range(&|p| p.1));
        if x[1] <= x[0] || !y[0].is_finite() || !y[1].is_finite() {
            return None;
        }
        let margin = ((y[1] - y[0]) * 0.05).max(1e-6);
        y = [(y[0] - margin).max(0.0), y[1] + margin];
        Some(Frame { x, y })
    }

    /// The curve in Braille, with `columns` columns and `rows` rows and an axis at the left; empty
    /// where there is nothing to draw.
    pub fn plot(&self, columns: usize, rows: usize) -> String {
        let Some(frame) = self.frame() else { return String::new() };
        let (wide, high) = (2 * columns.max(2), 4 * rows.max(2));
        let mut dots = vec![false; wide * high];
        let mut dot = |point: (f64, f64)| {
            let (x, y) = frame.at(point);
            let (x, y) = (x * (wide - 1) as f64, (1.0 - y) * (high - 1) as f64);
            dots[(y.round() as usize).min(high - 1) * wide + (x.round() as usize).min(wide - 1)] =
                true;
        };
        smooth(&self.training, wide).into_iter().for_each(&mut dot);
        for pair in self.held_out.windows(2) {
            let between = |t: f64| {
                (pair[0].0 + t * (pair[1].0 - pair[0].0), pair[0].1 + t * (pair[1].1 - pair[0].1))
            };
            (0..=wide).for_each(|i| dot(between(i as f64 / wide as f64)));
        }
        let mut text = String::new();
        for row in 0..high / 4 {
            let label = match row {
                0 => format!("{:8.3} ", frame.y[1]),
                row if row == high / 4 - 1 => format!("{:8.3} ", frame.y[0]),
                _ => " ".repeat(9),
            };
            text += &label;
            for column in 0..wide / 2 {
                // The dots of a cell, in the order of their bits.
                const CELL: [(usize, usize); 8] =
                    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)];
                let set = |(i, (x, y)): (usize, &(usize, usize))| {
                    u32::from(dots[(4 * row + y) * wide + 2 * column + x]) << i
                };
                let bits: u32 = CELL.iter().enumerate().map(set).sum();
                text.push(char::from_u32(0x2800 + bits).unwrap_or(' '));
            }
            text.push('\n');
        }
        text
    }

    /// The curve as an SVG of 800 by 400: each batch as a point, their mean as a line, what is held
    /// out as a line with marks.
    pub fn svg(&self) -> String {
        const LEFT: f64 = 60.0;
        const TOP: f64 = 20.0;
        const WIDE: f64 = 720.0;
        const HIGH: f64 = 330.0;
        let mut svg = String::from(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 400\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"800\" height=\"400\" fill=\"#fff\"/>\n",
        );
        let Some(frame) = self.frame() else { return svg + "</svg>\n" };
        let at = |point: &(f64, f64)| {
            let (x, y) = frame.at(*point);
            format!("{:.1},{:.1}", LEFT + x * WIDE, TOP + (1.0 - y) * HIGH)
        };
        for i in 0..=4 {
            let share = f64::from(i) / 4.0;
            let (y, value) =
                (TOP + (1.0 - share) * HIGH, frame.y[0] + share * (frame.y[1] - frame.y[0]));
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}h{WIDE}\" stroke=\"#ddd\"/><text x=\"52\" y=\"{:.1}\" text-anchor=\"end\">{value:.3}</text>",
                y + 4.0
            );
            let (x, value) = (LEFT + share * WIDE, frame.x[0] + share * (frame.x[1] - frame.x[0]));
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"368\" text-anchor=\"middle\">{value:.0}</text>"
            );
        }
        let line = |points: &[(f64, f64)], colour: &str| {
            let points: Vec<String> = points.iter().map(at).collect();
            format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
                points.join(" ")
            )
        };
        for point in &self.training {
            let place = at(point);
            let (x, y) = place.split_once(',').unwrap_or_default();
            let _ = writeln!(svg, "<circle cx=\"{x}\" cy=\"{y}\" r=\"1.5\" fill=\"#a9c4e6\"/>");
        }
        svg += &line(&smooth(&self.training, 200), "#2463a8");
        svg += &line(&self.held_out, "#c2501b");
        svg += "<text x=\"420\" y=\"390\" text-anchor=\"middle\">update</text>\
                <text x=\"600\" y=\"390\" fill=\"#2463a8\">training</text>\
                <text x=\"690\" y=\"390\" fill=\"#c2501b\">held out</text>\n</svg>\n";
        svg
    }
}

/// Means of runs of points, at most `most` of them.
fn smooth(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let run = points.len().div_ceil(most.max(1)).max(1);
    let mean = |run: &[(f64, f64)]| {
        let sum = run.iter().fold((0.0, 0.0), |(x, y), p| (x + p.0, y + p.1));
        (sum.0 / run.len() as f64, sum.1 / run.len() as f64)
    };
    points.chunks(run).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::{Curve, sparks};

    const LOG: &str = "{\"step\":0,\"held_out\":4.0}\n{\"step\":1,\"loss\":3.0}\nnonsense\n\
                       {\"step\":2,\"loss\":2.0}\n{\"step\":2,\"held_out\":2.5}\n";

    #[test]
    fn pictures_show_the_log() {
        let curve = Curve::of_log(LOG);
        assert_eq!(curve.training, [(1.0, 3.0), (2.0, 2.0)]);
        assert_eq!(curve.held_out, [(0.0, 4.0), (2.0, 2.5)]);
        let plot = curve.plot(20, 5);
        assert_eq!(plot.lines().count(), 5);
        assert!(plot.lines().all(|line| line.chars().count() == 29), "{plot}");
        // The held-out line begins in the upper left corner.
        assert!(plot.lines().next().unwrap().chars().nth(9).unwrap() > '\u{2800}', "{plot}");
        let svg = curve.svg();
        assert!(svg.contains("<polyline points=\"60.0,") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<circle").count(), 2);
    }

    #[test]
    fn a_line_shows_losses_as_they_fall() {
        assert_eq!(sparks(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8), "█▇▆▅▄▃▂▁");
        assert_eq!(sparks(&[4.0, 2.0, 1.0, 1.0], 2), "█▁", "means of neighbours");
        assert_eq!(sparks(&[3.0, 3.0], 16), "▁▁");
        assert_eq!(sparks(&[], 16), "");
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        for log in ["", "{\"step\":1,\"loss\":3.0}", "{\"step\":1,\"loss\":null}"] {
            assert_eq!(Curve::of_log(log).plot(20, 5), "", "{log}");
            assert!(Curve::of_log(log).svg().ends_with("</svg>\n"));
        }
    }
}
