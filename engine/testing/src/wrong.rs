//! A device that computes some nodes incorrectly, for tests of code that must detect this, and a
//! slightly imprecise device, for tests of tolerances.

use crate::recipe::Rng;
use samite_core::{
    DType, Device, DeviceWrapper, Error, Event, Node, PlacedGraph, Prepared, Result, Rows,
    RunControl, Stream, TensorRef, WrappedDevice,
};
use samite_quant::{can_encode, decode_row, encode_row};
use std::any::Any;
use std::sync::Arc;

type IsWrong = Arc<dyn Fn(Node<'_>) -> bool + Send + Sync>;
/// Changes the result of the node of this number.
type Corruption = fn(&TensorRef, usize) -> Result<()>;

/// Returns a device that computes like `device`, except for nodes that `is_wrong` selects. Their
/// results are 5 % too large. For integers, the first two are swapped.
pub fn wrong_device(
    device: &Arc<dyn Device>,
    is_wrong: impl Fn(Node<'_>) -> bool + Send + Sync + 'static,
) -> Arc<dyn Device> {
    WrappedDevice::device(FaultyDevice {
        inner: Arc::clone(device),
        is_wrong: Arc::new(is_wrong),
        spoil,
    })
}

/// Returns a device that computes like `device`, but imprecisely: the F32 results of a row are all
/// a unit in the last place (2^-23) larger, or all smaller, like those of a norm or softmax can be.
/// Its distance from `device` estimates that of another device that computes in F32.
pub fn imprecise_device(device: &Arc<dyn Device>) -> Arc<dyn Device> {
    let is_float = |node: Node<'_>| node.dtype() == DType::F32;
    WrappedDevice::device(FaultyDevice {
        inner: Arc::clone(device),
        is_wrong: Arc::new(is_float),
        spoil: nudge,
    })
}

struct FaultyDevice {
    inner: Arc<dyn Device>,
    is_wrong: IsWrong,
    spoil: Corruption,
}

impl DeviceWrapper for FaultyDevice {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.inner
    }

    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(WrongStream {
            inner: Arc::clone(&self.inner).open_stream()?,
            is_wrong: Arc::clone(&self.is_wrong),
            spoil: self.spoil,
        }))
    }
}

struct WrongStream {
    inner: Box<dyn Stream>,
    is_wrong: IsWrong,
    spoil: Corruption,
}

/// Work in pieces, each with the result that is changed after it.
struct FaultyWork(Vec<(Box<dyn Prepared>, Option<TensorRef>)>);

impl Prepared for FaultyWork {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Stream for WrongStream {
    fn device(&self) -> &dyn Device {
        self.inner.device()
    }

    fn set_threads(&mut self, threads: Option<usize>) {
        self.inner.set_threads(threads);
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        let is_wrong = |id: &_| (self.is_wrong)(work.graph.node(*id));
        let (mut pieces, mut rest) = (Vec::new(), work.nodes);
        while !rest.is_empty() {
            let wrong = rest.iter().position(is_wrong);
            let (nodes, later) = rest.split_at(wrong.map_or(rest.len(), |at| at + 1));
            // Compiled work covers all nodes together.
            let compiled = work.compiled.filter(|_| nodes.len() == work.nodes.len());
            let piece = self.inner.prepare(PlacedGraph {
                nodes,
                compiled,
                ..work
            })?;
            let result = wrong.and_then(|at| rest.get(at));
            let result = result.map(|&id| work.place(id).cloned()).transpose()?;
            pieces.push((piece, result));
            rest = later;
        }
        Ok(Box::new(FaultyWork(pieces)))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let Some(FaultyWork(pieces)) = prepared.as_any().downcast_mut() else {
            return Err(Error::invalid("work of another stream"));
        };
        for (number, (piece, result)) in pieces.iter_mut().enumerate() {
            self.inner.run(&mut **piece, control)?;
            if let Some(result) = result {
                self.inner.synchronize()?;
                (self.spoil)(result, number)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        self.inner.write(to, offset, data)
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        self.inner.read(from, offset, out)
    }

    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        self.inner.write_rows(to, rows, data)
    }

    fn read_rows(&mut self, from: &TensorRef, rows: Rows, out: &mut [u8]) -> Result<()> {
        self.inner.read_rows(from, rows, out)
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        self.inner.copy(from, to)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        self.inner.record(event)
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        self.inner.wait(event)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }
}

/// Makes the F32 numbers of each row of a result slightly larger or smaller.
fn nudge(result: &TensorRef, number: usize) -> Result<()> {
    let layout = result.layout();
    let mut bytes = vec![0; layout.bytes()];
    result.read(0, &mut bytes)?;
    let mut rng = Rng::new(number as u64);
    for row in 0..layout.rows() {
        let [i1, i2, i3] = layout.row_index(row);
        let start = layout.row_offset(i1, i2, i3);
        let factor = 1.0 + rng.pick(&[f32::EPSILON, -f32::EPSILON]);
        for i in 0..layout.shape()[0] {
            let at = start + i * layout.strides()[0];
            if let Some(float) = bytes.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
                *float = (f32::from_le_bytes(*float) * factor).to_le_bytes();
            }
        }
    }
    result.write(0, &bytes)
}

/// Makes a result wrong.
fn spoil(result: &TensorRef, _: usize) -> Result<()> {
    let layout = result.layout();
    let mut bytes = vec![0; layout.bytes()];
    result.read(0, &mut bytes)?;
    if can_encode(layout.dtype()) && layout.has_contiguous_rows() {
        let mut values = vec![0.0; layout.shape()[0]];
        for row in 0..layout.rows() {
            let [i1, i2, i3] = layout.row_index(row);
            let start = layout.row_offset(i1, i2, i3);
            let bytes = &mut bytes[start..start + layout.row_bytes()];
            decode_row(layout.dtype(), bytes, &mut values)?;
            values.iter_mut().for_each(|value| *value *= 1.05);
            encode_row(layout.dtype(), &values, bytes)?;
        }
    } else {
        let size = layout.dtype().block_bytes();
        if let Some(two) = bytes.get_mut(..2 * size) {
            two.rotate_left(size);
        }
    }
    result.write(0, &bytes)
}
