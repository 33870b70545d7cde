//! Gradients, losses and optimizer steps.

use super::attention::weigh;
use crate::call::Call;
use crate::value::{gathered, positions, zeros};
use samite_core::Result;

/// Sums all elements that [`Op::Repeat`](samite_core::Op::Repeat) created from one.
pub fn repeat_back(call: &Call) -> Result<()> {
    let x = call.numbers(0)?;
    let shape = call.result.tensor.layout().shape();
    let [n0, n1, n2, _] = shape;
    let mut sums = zeros(shape.iter().product())?;
    for position in positions(x.shape) {
        let [i0, i1, i2, i3] = std::array::from_fn(|d| position[d] % shape[d]);
        sums[i0 + n0 * (i1 + n1 * (i2 + n2 * i3))] += x.at(position);
    }
    call.store(&sums)
}

/// Computes `gradient * d(x sigmoid(x))/dx`.
pub fn silu_back(call: &Call) -> Result<()> {
    let (gradient, x) = (call.numbers(0)?, call.numbers(1)?);
    let pairs = gradient.values.iter().zip(&x.values);
    call.store_all(pairs.map(|(g, x)| {
        let s = 1.0 / (1.0 + (-x).exp());
        g * s * (1.0 + x * (1.0 - s))
    }))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Lets `f` append each row of the result, computed from the rows of sources 0 and 1.
fn rows(call: &Call, f: impl Fn(&[f64], &[f64], &mut Vec<f64>)) -> Result<()> {
    let (a, b) = (call.numbers(0)?, call.numbers(1)?);
    let mut values = call.room()?;
    for (a, b) in a.rows().zip(b.rows()) {
        f(a, b, &mut values);
    }
    call.store(&values)
}

/// Computes `r (gradient - x r² mean(gradient x))` with `r = 1 / sqrt(mean(x²) + eps)`.
pub fn rms_norm_back(call: &Call, eps: f64) -> Result<()> {
    rows(call, |gradient, x, values| {
        let n = x.len() as f64;
        let r = 1.0 / (dot(x, x) / n + eps).sqrt();
        let pull = r * r * dot(gradient, x) / n;
        let pairs = gradient.iter().zip(x);
        values.extend(pairs.map(|(g, x)| r * (g - x * pull)));
    })
}

/// Computes `scale * y (gradient - sum(gradient y))`.
pub fn soft_max_back(call: &Call, scale: f64) -> Result<()> {
    rows(call, |gradient, y, values| {
        let mean = dot(gradient, y);
        let pairs = gradient.iter().zip(y);
        values.extend(pairs.map(|(g, y)| scale * y * (g - mean)));
    })
}

/// Adds each row of the gradient to the row of the result that source 1 selects.
pub fn get_rows_back(call: &Call) -> Result<()> {
    let (gradient, numbers) = (call.numbers(0)?, call.integers(1)?);
    let [n0, count, ..] = call.result.tensor.layout().shape();
    let mut sums = zeros(n0 * count)?;
    for (row, &number) in gradient.rows().zip(&numbers.values) {
        let place = &mut sums[call.index(number, count, 1)? * n0..][..n0];
        place.iter_mut().zip(row).for_each(|(s, g)| *s += g);
    }
    call.store(&sums)
}

/// Computes `-sum(labels log(softmax(logits))) / rows`.
pub fn cross_entropy_loss(call: &Call) -> Result<()> {
    let (logits, labels) = (call.numbers(0)?, call.numbers(1)?);
    let mut sum = 0.0;
    for (logits, labels) in logits.rows().zip(labels.rows()) {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - largest).exp()).sum();
        let log_total = largest + total.ln();
        let pairs = logits.iter().zip(labels);
        sum += pairs.map(|(x, p)| p * (x - log_total)).sum::<f64>();
    }
    let rows: usize = logits.shape[1..].iter().product();
    call.store(&[-sum / rows as f64])
}

/// Computes `gradient * (softmax(logits) - labels) / rows`.
pub fn cross_entropy_loss_back(call: &Call) -> Result<()> {
    let gradient = call.numbers(0)?.values[0];
    let (logits, labels) = (call.numbers(1)?, call.numbers(2)?);
    let count: usize = logits.shape[1..].iter().product();
    let factor = gradient / count as f64;
    let mut values = call.room()?;
    for (logits, labels) in logits.rows().zip(labels.rows()) {
        let at = values.len();
        values.extend(logits);
        let softmax = &mut values[at..];
        weigh(softmax, None);
        softmax
            .iter_mut()
            .zip(labels)
            .for_each(|(y, p)| *y = factor * (*y - p));
    }
    call.store(&values)
}

/// Computes one AdamW step.
pub fn adamw(call: &Call) -> Result<()> {
    let (mut w, g) = (call.numbers(0)?.values, call.numbers(1)?.values);
    let (mut m, mut v) = (call.numbers(2)?.values, call.numbers(3)?.values);
    let p = call.numbers(4)?.values;
    let (rate, beta1, beta2, eps, decay) = (p[0], p[1], p[2], p[3], p[4]);
    let (correct1, correct2) = (p[5], p[6]);
    for i in 0..w.len() {
        m[i] = m[i] * beta1 + g[i] * (1.0 - beta1);
        v[i] = v[i] * beta2 + g[i] * g[i] * (1.0 - beta2);
        let step = m[i] * correct1 / ((v[i] * correct2).sqrt() + eps);
        w[i] = w[i] * (1.0 - rate * decay) - rate * step;
    }
    call.store_source(0, &w)?;
    call.store_source(2, &m)?;
    call.store_source(3, &v)
}

/// Computes one step of gradient descent.
pub fn sgd(call: &Call) -> Result<()> {
    let (w, g, p) = (call.numbers(0)?, call.numbers(1)?, call.numbers(2)?.values);
    let keep = 1.0 - p[0] * p[1];
    let pairs = w.values.iter().zip(&g.values);
    let values = gathered(w.values.len(), pairs.map(|(w, g)| w * keep - p[0] * g))?;
    call.store_source(0, &values)
}
