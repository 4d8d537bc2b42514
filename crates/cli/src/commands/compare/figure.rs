//! The divergences of a comparison as an SVG: each scored token a point, from left to right in the
//! order of the text, upwards by the logarithm of its divergence.

use super::Scored;
use std::fmt::Write;

/// The least power of ten that is drawn: what lies below is at the floor.
const FLOOR: f64 = -8.0;
/// Points at most; of more, the furthest of neighbours are drawn.
const MOST: usize = 4000;

const LEFT: f64 = 64.0;
const TOP: f64 = 44.0;
const WIDE: f64 = 716.0;
const HIGH: f64 = 300.0;

/// Draws `all`, with lines at the `marks`, divergences and what they are called.
pub(super) fn svg(all: &[Scored], title: &str, marks: &[(&str, f64)]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 400\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"800\" height=\"400\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"14\">{}</text>\n",
        escaped(title)
    );
    let power = |divergence: f64| divergence.log10().max(FLOOR);
    let largest = all.iter().map(|scored| power(scored.divergence)).fold(FLOOR, f64::max);
    let ceiling = (largest.floor() + 1.0).max(FLOOR + 1.0);
    let y = |power: f64| TOP + (ceiling - power) / (ceiling - FLOOR) * HIGH;
    for i in 0..=(ceiling - FLOOR) as i32 {
        let at = FLOOR + f64::from(i);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {:.1}h{WIDE}\" stroke=\"#ddd\"/><text x=\"56\" y=\"{:.1}\" text-anchor=\"end\">1e{at}</text>",
            y(at),
            y(at) + 4.0
        );
    }
    let (first, last) = (all.first().map_or(0, |s| s.at), all.last().map_or(0, |s| s.at));
    let range = (last - first).max(1) as f64;
    let x = |at: usize| LEFT + (at - first) as f64 / range * WIDE;
    for i in 0..=4 {
        let at = first + (last - first) * i / 4;
        let place = x(at);
        let _ =
            writeln!(svg, "<text x=\"{place:.1}\" y=\"362\" text-anchor=\"middle\">{at}</text>");
    }
    for run in all.chunks(all.len().div_ceil(MOST).max(1)) {
        let furthest = run.iter().max_by(|a, b| a.divergence.total_cmp(&b.divergence));
        let Some(scored) = furthest else { continue };
        let same = scored.first[0] == scored.first[1];
        let colour = if same { "#2463a8" } else { "#c2501b" };
        let (x, y) = (x(scored.at), y(power(scored.divergence)));
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2\" fill=\"{colour}\" fill-opacity=\"0.6\"/>"
        );
    }
    for (name, divergence) in marks {
        let y = y(power(*divergence));
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}h{WIDE}\" stroke=\"#444\" stroke-dasharray=\"4 3\"/>\
             <text x=\"776\" y=\"{:.1}\" text-anchor=\"end\">{} {divergence:.2e}</text>",
            y - 4.0,
            escaped(name)
        );
    }
    svg += "<text x=\"64\" y=\"388\">KL divergence (nats) by token of the text</text>\
            <text x=\"430\" y=\"388\" fill=\"#2463a8\">same likeliest token</text>\
            <text x=\"610\" y=\"388\" fill=\"#c2501b\">another likeliest token</text>\n</svg>\n";
    svg
}

/// Text as it stands in XML; control characters, which cannot, are left out.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            c if c.is_control() => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(at: usize, divergence: f64, first: [u32; 2]) -> Scored {
        Scored { at, divergence, nll: [0.0; 2], first }
    }

    #[test]
    fn every_token_is_a_point_by_its_divergence() {
        let all = [one(10, 0.1, [1, 1]), one(11, 1e-12, [1, 1]), one(20, 0.01, [1, 2])];
        let drawn = svg(&all, "a <b> & c", &[("median", 0.01)]);
        // From 1e-8 to 1: 300 points for eight powers of ten.
        for part in [
            "a &lt;b&gt; &amp; c",
            "cx=\"64.0\" cy=\"81.5\" r=\"2\" fill=\"#2463a8\"",
            "cx=\"135.6\" cy=\"344.0\"",
            "cx=\"780.0\" cy=\"119.0\" r=\"2\" fill=\"#c2501b\"",
            "median 1.00e-2",
        ] {
            assert!(drawn.contains(part), "{part} in {drawn}");
        }
        assert_eq!(drawn.matches("<circle").count(), 3);
        let many: Vec<Scored> = (0..3 * MOST).map(|at| one(at, 1e-3, [0, 0])).collect();
        assert_eq!(svg(&many, "", &[]).matches("<circle").count(), MOST);
        assert!(svg(&[], "", &[]).ends_with("</svg>\n"));
    }
}
