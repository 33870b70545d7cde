//! The loss curve, as a table and as an image.

use crate::error::{Error, Result};
use std::fmt::Write as _;
use std::path::Path;

/// Measurements of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Number of steps done.
    pub step: u64,
    /// Loss of the step, in nats per token.
    pub loss: f32,
    /// Loss on held-out texts, if it was measured.
    pub held_out: Option<f32>,
    /// Learning rate.
    pub rate: f32,
    /// Norm of the gradient.
    pub gradient_norm: f32,
}

/// Loss over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    points: Vec<Point>,
}

const HEADER: &str = "step,loss,held_out,rate,gradient_norm";

impl Curve {
    /// Creates an empty curve.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all points, in the order of steps.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Appends a point. Removes points that are not before it, because a run that resumes from a
    /// checkpoint repeats some steps.
    pub fn push(&mut self, point: Point) {
        self.points.retain(|known| known.step < point.step);
        self.points.push(point);
    }

    /// Returns the table.
    pub fn to_csv(&self) -> String {
        let mut text = format!("{HEADER}\n");
        for point in &self.points {
            let held_out = point
                .held_out
                .map_or(String::new(), |loss| loss.to_string());
            let Point {
                step,
                loss,
                rate,
                gradient_norm,
                ..
            } = point;
            let _ = writeln!(text, "{step},{loss},{held_out},{rate},{gradient_norm}");
        }
        text
    }

    /// Reads a table in the format of [`to_csv`](Self::to_csv). Returns an empty curve if the file
    /// does not exist.
    ///
    /// # Errors
    /// Returns [`Error::Io`], or [`Error::Data`] with the invalid line.
    pub fn read_csv(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::new()),
            Err(error) => return Err(Error::io(path, error)),
        };
        let mut curve = Self::new();
        for (number, line) in text.lines().enumerate().skip(1) {
            let point = parse(line).ok_or_else(|| {
                Error::data(format!(
                    "{}, line {}: this is no row of a loss table",
                    path.display(),
                    number + 1
                ))
            })?;
            curve.push(point);
        }
        Ok(curve)
    }

    /// Returns the image: loss over steps, with a line for the losses of single steps and dots for
    /// those of held-out texts.
    pub fn to_svg(&self, title: &str) -> String {
        const SIZE: [f32; 2] = [720.0, 400.0];
        const MARGIN: f32 = 48.0;
        let last = self.points.last().map_or(1, |point| point.step.max(1)) as f32;
        let losses = || {
            let all = self.points.iter();
            all.flat_map(|p| [Some(p.loss), p.held_out]).flatten()
        };
        let top = losses().fold(1e-3f32, f32::max).ceil();
        let x = |step: u64| MARGIN + (SIZE[0] - 2.0 * MARGIN) * step as f32 / last;
        let y = |loss: f32| SIZE[1] - MARGIN - (SIZE[1] - 2.0 * MARGIN) * (loss / top);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"24\" font-size=\"14\">{}</text>\n",
            SIZE[0],
            SIZE[1],
            escape(title)
        );
        for tick in 0..=4u8 {
            let share = f32::from(tick) / 4.0;
            let (loss, step) = (top * share, (last * share) as u64);
            let _ = writeln!(
                svg,
                "<path d=\"M{MARGIN} {0}H{1}\" stroke=\"#ddd\"/><text x=\"8\" \
                 y=\"{0}\">{loss:.2}</text>\
                 <text x=\"{2}\" y=\"{3}\">{step}</text>",
                y(loss),
                SIZE[0] - MARGIN,
                x(step) - 8.0,
                SIZE[1] - MARGIN + 18.0
            );
        }
        // At most as many points as there are pixels.
        let stride = self.points.len().div_ceil(1000).max(1);
        let line: Vec<_> = self
            .points
            .chunks(stride)
            .map(|part| {
                let mean = part.iter().map(|p| p.loss).sum::<f32>() / part.len() as f32;
                format!("{:.1},{:.1}", x(part[0].step), y(mean))
            })
            .collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"#36c\" points=\"{}\"/>",
            line.join(" ")
        );
        for point in &self.points {
            if let Some(loss) = point.held_out {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\" fill=\"#c33\"/>",
                    x(point.step),
                    y(loss)
                );
            }
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn parse(line: &str) -> Option<Point> {
    let fields: Vec<_> = line.split(',').collect();
    let [step, loss, held_out, rate, gradient_norm] = fields[..] else {
        return None;
    };
    Some(Point {
        step: step.parse().ok()?,
        loss: loss.parse().ok()?,
        held_out: match held_out {
            "" => None,
            text => Some(text.parse().ok()?),
        },
        rate: rate.parse().ok()?,
        gradient_norm: gradient_norm.parse().ok()?,
    })
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(step: u64, held_out: Option<f32>) -> Point {
        Point {
            step,
            loss: 3.5 / step as f32,
            held_out,
            rate: 0.1,
            gradient_norm: 2.25,
        }
    }

    #[test]
    fn curve_tables_round_trip_and_repeated_steps_replace_old_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.csv");
        assert_eq!(Curve::read_csv(&path).unwrap(), Curve::new());
        let mut curve = Curve::new();
        (1..=5).for_each(|step| curve.push(point(step, (step % 2 == 0).then_some(1.5))));
        std::fs::write(&path, curve.to_csv()).unwrap();
        assert_eq!(Curve::read_csv(&path).unwrap(), curve);
        curve.push(point(3, None));
        let steps: Vec<_> = curve.points().iter().map(|p| p.step).collect();
        assert_eq!(steps, [1, 2, 3]);
        std::fs::write(&path, format!("{HEADER}\n1,2\n")).unwrap();
        let error = Curve::read_csv(&path).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
    }

    #[test]
    fn svg_curves_have_a_line_and_dots() {
        let mut curve = Curve::new();
        (1..=3000).for_each(|step| curve.push(point(step, (step % 1000 == 0).then_some(0.5))));
        let svg = curve.to_svg("a < b");
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a &lt; b") && svg.len() < 40_000);
        assert!(!Curve::new().to_svg("").contains("NaN"));
    }
}
