//! A small graph with known numbers. A plugin's device must compute it in the process that tries
//! the plugin before it is used without being named: that a library loads and single operations are
//! right says little about graphs.
//!
//! The graph is one layer of a language model, with weights in the device's memory. Nodes that the
//! device does not support are computed here, as another device would do in normal use.

use super::check::{OneShotGraph, compute, is_close};
use samite_core::{
    DType, Device, Glu, Graph, Layout, Op, Precision, Result, StoredTensor, TensorGroup, TensorId,
    Usage,
};
use std::sync::Arc;

/// Length of a token's vector, and number of tokens.
const WIDTH: usize = 32;
const TOKENS: usize = 3;

/// A matrix of the layer: its numbers, and its tensor in the device's graph if there is one.
struct Matrix {
    columns: usize,
    rows: usize,
    numbers: Vec<f32>,
    node: Option<TensorId>,
}

struct DeviceTrial<'a> {
    device: &'a dyn Device,
    graph: Graph,
    matrices: Vec<Matrix>,
    /// Inputs of the graph.
    inputs: Vec<(TensorId, usize)>,
    /// Nodes that the device computes, and if other nodes use them.
    computed: Vec<(TensorId, usize, bool)>,
}

/// Returns pseudo-random numbers from -1 to 1 that are always the same.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 37 + seed * 101) * 7919 % 2003) as f32 / 1001.0 - 1.0;
    (0..count).map(number).collect()
}

fn rows(numbers: &[f32], columns: usize, f: impl Fn(&[f32]) -> Vec<f32>) -> Vec<f32> {
    numbers.chunks(columns).flat_map(f).collect()
}

fn each(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    let b = b.iter().cycle();
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

impl<'a> DeviceTrial<'a> {
    /// Adds a value from outside the graph.
    fn given(&mut self, columns: usize, rows: usize, numbers: Vec<f32>) -> usize {
        self.matrices.push(Matrix {
            columns,
            rows,
            numbers,
            node: None,
        });
        self.matrices.len() - 1
    }

    fn weights(&mut self, stored: &[Arc<StoredTensor>], number: usize) -> Result<usize> {
        let weights = &stored[number];
        let [columns, rows, ..] = weights.layout().shape();
        let at = self.given(columns, rows, weight_numbers(number, weights.layout()));
        self.matrices[at].node = Some(self.graph.stored(weights)?);
        Ok(at)
    }

    fn numbers(&self, at: usize) -> &[f32] {
        &self.matrices[at].numbers
    }

    /// Returns the tensor of a value. It is an input if the device did not compute it.
    fn tensor(&mut self, at: usize) -> Result<TensorId> {
        let matrix = &mut self.matrices[at];
        if let Some(node) = matrix.node {
            return Ok(node);
        }
        let shape = [matrix.columns, matrix.rows, 1, 1];
        let input = self.graph.input(&format!("value{at}"), DType::F32, shape)?;
        matrix.node = Some(input);
        self.inputs.push((input, at));
        Ok(input)
    }

    /// Adds the result of `op` on other values, with its known numbers.
    fn step(
        &mut self,
        op: Op,
        sources: &[usize],
        result: (usize, usize, Vec<f32>),
    ) -> Result<usize> {
        let (columns, rows, numbers) = result;
        let ids = sources
            .iter()
            .map(|&source| Ok(Some(self.tensor(source)?)))
            .collect::<Result<Vec<_>>>()?;
        let node = self.graph.push(op, &ids)?;
        let at = self.given(columns, rows, numbers);
        if self.device.supports(self.graph.node(node)).is_yes() {
            self.matrices[at].node = Some(node);
            for (known, _, used) in &mut self.computed {
                *used |= ids.contains(&Some(*known));
            }
            self.computed.push((node, at, false));
        }
        Ok(at)
    }

    /// Multiplies every row of `b` by every row of `a`.
    fn product(&mut self, a: usize, b: usize) -> Result<usize> {
        let precision = Precision::F32;
        let (columns, out) = (self.matrices[a].columns, self.matrices[a].rows);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        let numbers = rows(self.numbers(b), columns, |b| {
            let a = self.numbers(a).chunks(columns);
            a.map(|a| dot(a, b)).collect()
        });
        let tokens = self.matrices[b].rows;
        self.step(Op::MulMat { precision }, &[a, b], (out, tokens, numbers))
    }

    /// Adds an operation on two values whose result has the shape of the first.
    fn both(&mut self, op: Op, a: usize, b: usize, f: impl Fn(f32, f32) -> f32) -> Result<usize> {
        let numbers = each(self.numbers(a), self.numbers(b), f);
        let (columns, rows) = (self.matrices[a].columns, self.matrices[a].rows);
        self.step(op, &[a, b], (columns, rows, numbers))
    }

    /// Builds the layer.
    fn layer(&mut self, stored: &[Arc<StoredTensor>]) -> Result<()> {
        let weights = (0..stored.len())
            .map(|number| self.weights(stored, number))
            .collect::<Result<Vec<_>>>()?;
        let &[gain, query, key, value, output, gate, up, down] = &*weights else {
            return Ok(());
        };
        let x = self.given(WIDTH, TOKENS, numbers(0, WIDTH * TOKENS));
        let eps = 1e-5;
        let normal = rows(self.numbers(x), WIDTH, |row| {
            let mean = row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32;
            row.iter().map(|x| x / (mean + eps).sqrt()).collect()
        });
        let normal = self.step(Op::RmsNorm { eps }, &[x], (WIDTH, TOKENS, normal))?;
        let scaled = self.both(Op::Mul, normal, gain, |a, b| a * b)?;
        let queries = self.product(query, scaled)?;
        let keys = self.product(key, scaled)?;
        // Values are transposed: one row per element, one column per token.
        let values = self.product(scaled, value)?;
        let scores = self.product(keys, queries)?;
        let scale = 0.2;
        let shares = rows(self.numbers(scores), TOKENS, |row| {
            let most = row.iter().fold(f32::MIN, |a, &b| a.max(b));
            let powers: Vec<_> = row.iter().map(|x| ((x - most) * scale).exp()).collect();
            let sum: f32 = powers.iter().sum();
            powers.iter().map(|x| x / sum).collect()
        });
        let soft_max = Op::SoftMax {
            scale,
            max_bias: 0.0,
        };
        let shares = self.step(soft_max, &[scores], (TOKENS, TOKENS, shares))?;
        let mixed = self.product(values, shares)?;
        let mixed = self.product(output, mixed)?;
        let y = self.both(Op::Add, mixed, x, |a, b| a + b)?;
        let (open, raised) = (self.product(gate, y)?, self.product(up, y)?);
        let glu = Op::Glu {
            kind: Glu::Swiglu,
            swapped: false,
        };
        let hidden = self.both(glu, open, raised, |a, b| a / (1.0 + (-a).exp()) * b)?;
        let lowered = self.product(down, hidden)?;
        self.both(Op::Add, lowered, y, |a, b| a + b)?;
        Ok(())
    }
}

/// Returns weights small enough that results stay near 1.
fn weight_numbers(number: usize, layout: &Layout) -> Vec<f32> {
    let scale = 1.0 / (WIDTH as f32).sqrt();
    let values = numbers(number + 1, layout.elements());
    match number {
        0 => values.iter().map(|x| 1.0 + x / 2.0).collect(),
        _ => values.iter().map(|x| x * scale * 1.5).collect(),
    }
}

fn stored_weights(device: &dyn Device) -> Result<Vec<Arc<StoredTensor>>> {
    let vector = Layout::contiguous(DType::F32, [WIDTH, 1, 1, 1])?;
    let matrix = Layout::contiguous(DType::F32, [WIDTH, WIDTH, 1, 1])?;
    let names = [
        "gain", "query", "key", "value", "output", "gate", "up", "down",
    ];
    let layouts = names.map(|name| (name, if name == "gain" { vector } else { matrix }));
    let group = TensorGroup::allocate(&device.buffer_type(), Usage::Weights, &layouts)?;
    for (number, tensor) in group.tensors.iter().enumerate() {
        let values = weight_numbers(number, tensor.layout());
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        tensor.tensor().write(0, &bytes)?;
    }
    Ok(group.tensors)
}

fn attempt(device: &Arc<dyn Device>) -> Result<Option<String>> {
    let stored = stored_weights(&**device)?;
    let mut trial = DeviceTrial {
        device: &**device,
        graph: Graph::new(),
        matrices: Vec::new(),
        inputs: Vec::new(),
        computed: Vec::new(),
    };
    trial.layer(&stored)?;
    let mut graph = trial.graph;
    let nodes: Vec<_> = trial.computed.iter().map(|&(node, ..)| node).collect();
    if !nodes
        .iter()
        .any(|&id| matches!(graph.tensor(id).op, Op::MulMat { .. }))
    {
        return Ok(Some(
            "it does not support the products of a small graph".into(),
        ));
    }
    let matrices = trial.matrices;
    let inputs: Vec<_> = trial
        .inputs
        .iter()
        .map(|&(id, at)| (id, &*matrices[at].numbers))
        .collect();
    // Intermediate results affect the final ones, so only those are checked.
    let ends: Vec<_> = trial.computed.iter().filter(|(.., used)| !used).collect();
    for (id, ..) in &ends {
        graph.set_output(*id);
    }
    let mut stream = Arc::clone(device).open_stream()?;
    let wanted: Vec<_> = ends.iter().map(|(id, ..)| *id).collect();
    let found = compute(
        &**device,
        &mut *stream,
        OneShotGraph {
            graph: &graph,
            nodes: &nodes,
            inputs: &inputs,
            results: &wanted,
        },
    )?;
    for ((id, at, _), found) in ends.iter().zip(found) {
        let expected = &matrices[*at].numbers;
        let pairs = found.iter().zip(expected).enumerate();
        let mut wrong = pairs.filter(|(_, (found, expected))| !is_close(**found, **expected));
        if let Some((element, (found, expected))) = wrong.next() {
            let op = graph.tensor(*id).op.name();
            return Ok(Some(format!(
                "it computes a small graph wrong: element {element} of {op} is {found} instead of {expected}"
            )));
        }
    }
    Ok(None)
}

/// Lets the device compute the graph.
///
/// # Errors
/// Returns the error in the result, or the reason why there is no result.
pub fn run(device: &Arc<dyn Device>) -> std::result::Result<(), String> {
    match attempt(device) {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => Err(reason),
        Err(error) => Err(format!("it fails on a small graph: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    fn reference(without: &[&str]) -> Arc<dyn Device> {
        ReferenceDevice::new(ReferenceOptions {
            without_ops: without.iter().map(ToString::to_string).collect(),
            ..ReferenceOptions::default()
        })
    }

    #[test]
    fn the_reference_passes_without_optional_operations() {
        for without in [&[] as &[_], &["rms_norm"], &["soft_max", "glu", "add"]] {
            assert_eq!(run(&reference(without)), Ok(()), "{without:?}");
        }
        let reason = run(&reference(&["mul_mat"])).unwrap_err();
        assert!(reason.contains("does not support the products"), "{reason}");
    }
}
