//! Checks some known results of a device, to find out if its plugin uses the expected operation
//! numbers and structure layouts.
//!
//! A plugin that comes with upstream's `libggml-base` reports its release through it. A plugin
//! alone reports only its interface version, which several releases share. Operation numbers were
//! inserted in the middle between releases, so the last ones distinguish releases. A plugin of
//! another release computes something else, or ends the process that tries it.

use super::buffer::GgmlBuffer;
use super::device::GgmlDevice;
use samite_core::{
    BufferType as _, CancelToken, DType, Device, Error, Glu, Graph, Op, PlacedGraph, Precision,
    Result, RunControl, Slot, Stream, TensorId, TensorInfo, TensorRef, Unary, Usage,
};
use std::sync::Arc;

/// Shape of operand matrices.
const COLUMNS: usize = 32;
const ROWS: usize = 2;

/// An operation on one or two operands, and its expected result.
struct TrialCase {
    op: Op,
    operands: usize,
    answer: fn(&[f32], &[f32]) -> Vec<f32>,
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Returns questions from all over ggml's operation numbers.
fn questions() -> Vec<TrialCase> {
    let each = |op, answer| TrialCase {
        op,
        operands: 1,
        answer,
    };
    let both = |op, answer| TrialCase {
        op,
        operands: 2,
        answer,
    };
    vec![
        both(Op::Add, |a, b| {
            a.iter().zip(b).map(|(a, b)| a + b).collect()
        }),
        each(Op::Sqr, |a, _| a.iter().map(|a| a * a).collect()),
        each(Op::RmsNorm { eps: 0.5 }, |a, _| {
            let rows = a.chunks(COLUMNS);
            rows.flat_map(|row| {
                let mean = row.iter().map(|x| x * x).sum::<f32>() / COLUMNS as f32;
                row.iter().map(move |x| x / (mean + 0.5).sqrt())
            })
            .collect()
        }),
        both(
            Op::MulMat {
                precision: Precision::F32,
            },
            |a, b| {
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum();
                let columns = b.chunks(COLUMNS);
                columns
                    .flat_map(|b| a.chunks(COLUMNS).map(move |a| dot(a, b)))
                    .collect()
            },
        ),
        each(
            Op::Scale {
                scale: 2.0,
                bias: 0.5,
            },
            |a, _| a.iter().map(|a| 2.0 * a + 0.5).collect(),
        ),
        each(
            Op::Clamp {
                min: -0.5,
                max: 0.75,
            },
            |a, _| a.iter().map(|a| a.clamp(-0.5, 0.75)).collect(),
        ),
        each(Op::Unary(Unary::Silu), |a, _| {
            a.iter().map(|&a| silu(a)).collect()
        }),
        both(
            Op::Glu {
                kind: Glu::Swiglu,
                swapped: false,
            },
            |a, b| a.iter().zip(b).map(|(&a, b)| silu(a) * b).collect(),
        ),
    ]
}

/// A graph to compute once.
pub struct OneShotGraph<'a> {
    pub graph: &'a Graph,
    /// Nodes to compute, in order.
    pub nodes: &'a [TensorId],
    /// F32 values of inputs. Other leaves are stored.
    pub inputs: &'a [(TensorId, &'a [f32])],
    /// F32 results to read.
    pub results: &'a [TensorId],
}

/// Computes a graph without views in memory of the device.
pub fn compute(
    device: &dyn Device,
    stream: &mut dyn Stream,
    wanted: OneShotGraph<'_>,
) -> Result<Vec<Vec<f32>>> {
    let OneShotGraph { graph, nodes, .. } = wanted;
    let memory = device.buffer_type();
    let mut end = 0;
    let mut offsets = vec![None; graph.len()];
    let inputs = wanted.inputs.iter().map(|(id, _)| id);
    for id in inputs.chain(nodes) {
        let tensor = graph.node(*id);
        let size = memory.alloc_size(&TensorInfo::from_node(tensor, Usage::Compute))?;
        offsets[id.index()] = Some(end);
        end += size.next_multiple_of(memory.alignment());
    }
    let buffer = memory.allocate(end, Usage::Compute)?;
    let tensors = graph.tensors().iter().zip(offsets);
    let places: Vec<_> = tensors
        .map(|(tensor, offset)| match &tensor.stored {
            Some(stored) => Some(stored.tensor().clone()),
            None => offset.map(|offset| TensorRef {
                buffer: Arc::clone(&buffer),
                slot: Slot {
                    offset,
                    layout: tensor.layout,
                },
            }),
        })
        .collect();
    let place = |id: TensorId| {
        let place = places.get(id.index()).and_then(Option::as_ref);
        place.ok_or_else(|| Error::invalid("a tensor has no place"))
    };
    for (id, values) in wanted.inputs {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        stream.write(place(*id)?, 0, &bytes)?;
    }
    let mut prepared = stream.prepare(PlacedGraph {
        graph,
        nodes,
        places: &places,
        workspace: None,
        compiled: None,
    })?;
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control)?;
    let read = |id: &TensorId| {
        let mut bytes = vec![0; graph.tensor(*id).layout.bytes()];
        stream.read(place(*id)?, 0, &mut bytes)?;
        let values = bytes.as_chunks::<4>().0.iter();
        Ok(values.map(|&bytes| f32::from_ne_bytes(bytes)).collect())
    };
    wanted.results.iter().map(read).collect()
}

/// Returns the result of the device, or `None` if it does not support the operation.
fn ask(
    device: &dyn Device,
    stream: &mut dyn Stream,
    question: &TrialCase,
    operands: [&[f32]; 2],
) -> Result<Option<Vec<f32>>> {
    let mut graph = Graph::new();
    let mut inputs = Vec::new();
    let named = ["a", "b"].into_iter().zip(operands);
    for (name, values) in named.take(question.operands) {
        let input = graph.input(name, DType::F32, [COLUMNS, ROWS, 1, 1])?;
        inputs.push((input, values));
    }
    let ids: Vec<_> = inputs.iter().map(|&(id, _)| Some(id)).collect();
    let node = graph.push(question.op, &ids)?;
    graph.set_output(node);
    if !device.supports(graph.node(node)).is_yes() {
        return Ok(None);
    }
    let wanted = OneShotGraph {
        graph: &graph,
        nodes: &[node],
        inputs: &inputs,
        results: &[node],
    };
    Ok(compute(device, stream, wanted)?.pop())
}

/// Returns whether a number is close to the expected one: kernels may compute with 16 bits. NaN is
/// never close.
pub fn is_close(found: f32, expected: f32) -> bool {
    (found - expected).abs() <= 0.02 * (1.0 + expected.abs())
}

/// Checks that a plugin's buffers have the expected layout. Releases that number operations alike
/// can differ in it.
///
/// # Errors
/// Returns the buffer type with another layout.
pub fn has_layout(device: &GgmlDevice) -> std::result::Result<(), String> {
    device.memories().try_for_each(|memory| {
        let buffer = memory.allocate(1, Usage::Weights);
        let buffer = buffer.map_err(|error| error.to_string())?;
        let buffer = buffer.as_any().downcast_ref::<GgmlBuffer>();
        if buffer.is_none_or(GgmlBuffer::has_type) {
            Ok(())
        } else {
            Err(format!("{}: a buffer has another layout", memory.name()))
        }
    })
}

/// Checks that the device computes the known results, as far as it supports the operations.
///
/// # Errors
/// Returns the operation with a wrong result.
pub fn computes(device: &Arc<dyn Device>) -> std::result::Result<(), String> {
    let values = |factor: usize| -> Vec<f32> {
        let numbers = 0..COLUMNS * ROWS;
        numbers
            .map(|i| (i * factor % 13) as f32 / 4.0 - 1.5)
            .collect()
    };
    let (a, b) = (values(7), values(5));
    let mut stream = Arc::clone(device)
        .open_stream()
        .map_err(|error| error.to_string())?;
    for question in questions() {
        let found = ask(&**device, &mut *stream, &question, [&a, &b])
            .map_err(|error| format!("{}: {error}", question.op))?;
        let Some(found) = found else { continue };
        let expected = (question.answer)(&a, &b);
        if found.len() != expected.len()
            || !found.iter().zip(&expected).all(|(a, b)| is_close(*a, *b))
        {
            return Err(format!(
                "{} does not compute {}: a plugin of another release, which has to come with its libggml-base",
                device.name(),
                question.op
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_match_the_reference() {
        use samite_reference::{ReferenceDevice, ReferenceOptions};
        let device: Arc<dyn Device> = ReferenceDevice::new(ReferenceOptions::default());
        assert_eq!(computes(&device), Ok(()));
        let mut stream = Arc::clone(&device).open_stream().unwrap();
        let operands = [1.0; COLUMNS * ROWS];
        for question in questions() {
            let answer = ask(&*device, &mut *stream, &question, [&operands; 2]);
            assert!(answer.unwrap().is_some(), "{} is supported", question.op);
        }
    }
}
