//! A small computation with known results, before anything else is computed: drivers have errors.
//!
//! Sums over subgroups are tried first. Where they are wrong, sums go through workgroup memory; where these are wrong too, the device is refused.

use crate::device::WgpuDevice;
use crate::gpu::Gpu;
use crate::kept::Kept;
use crate::options::WgpuOptions;
use crate::stream::WgpuStream;
use samite_core::{
    CancelToken, DType, Device, Error, Graph, Placed, Result, RunControl, Stream, TensorGroup,
    TensorId, TensorRef, Usage,
};
use std::sync::Arc;

/// What an adapter computes right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything that was tried.
    All,
    /// What has no operations over subgroups.
    WithoutSubgroups,
}

const ALL: &str = "computes right";
const WITHOUT_SUBGROUPS: &str = "computes wrong by subgroups";

/// The verdict on an adapter: the one that was kept for it and its driver, or a new one.
///
/// # Errors
/// If it computes wrong, or fails.
pub fn verdict(device: &WgpuDevice) -> Result<Verdict> {
    let gpu = device.gpu();
    // What a test made wrong is no property of the adapter.
    let kept = Kept::of(&gpu.info, "test").filter(|_| !gpu.is_falsified());
    match kept.as_ref().and_then(Kept::text).as_deref() {
        Some(ALL) => return Ok(Verdict::All),
        Some(WITHOUT_SUBGROUPS) => return Ok(warned(gpu)),
        _ => {}
    }
    let (verdict, text) = match (
        gpu.has_subgroups && is_right(device, true)?,
        gpu.has_subgroups,
    ) {
        (true, _) => (Verdict::All, ALL),
        _ if !is_right(device, false)? => {
            let message = "its driver computes wrong: sums, norms and products of the test at opening differ from what they must be";
            return Err(Error::device(gpu.name(), message));
        }
        (false, false) => (Verdict::All, ALL),
        (false, true) => (warned(gpu), WITHOUT_SUBGROUPS),
    };
    if let Some(kept) = kept {
        kept.write(text.as_bytes());
    }
    Ok(verdict)
}

fn warned(gpu: &Gpu) -> Verdict {
    tracing::warn!(
        "{}: operations over subgroups compute wrong in the test at opening, and are not used",
        gpu.name()
    );
    Verdict::WithoutSubgroups
}

/// More than a workgroup's invocations take at once, and no multiple of anything.
const LENGTH: usize = 1051;
const ROWS: usize = 3;
const EPS: f32 = 1e-5;

/// Element `i` of operand `number`: small numbers, without order.
fn element(number: usize, i: usize) -> f32 {
    ((i * 37 + number * 11) % 101) as f32 / 101.0 - 0.3
}

/// Whether a norm, a softmax, sums of rows and a product come out right.
fn is_right(device: &WgpuDevice, subgroups: bool) -> Result<bool> {
    let options = WgpuOptions {
        without_subgroups: !subgroups,
        ..WgpuOptions::default()
    };
    let device = Arc::new(device.with(options));
    let mut graph = Graph::new();
    let shape = [LENGTH, ROWS, 1, 1];
    let x = graph.input("x", DType::F32, shape)?;
    let w = graph.input("w", DType::F32, shape)?;
    let results = [
        graph.rms_norm(x, EPS)?,
        graph.soft_max(x, None, None, 1.0, 0.0)?,
        graph.sum_rows(x)?,
        graph.mul_mat(w, x)?,
    ];
    let place = |id: TensorId| -> Result<Option<TensorRef>> {
        let wanted = [("", graph.tensor(id).layout)];
        let group = TensorGroup::allocate(&device.buffer_type(), Usage::Compute, &wanted)?;
        Ok(Some(group.tensors[0].tensor().clone()))
    };
    let places = graph.ids().map(place).collect::<Result<Vec<_>>>()?;
    let mut stream = WgpuStream::open(device)?;
    let work = Placed {
        graph: &graph,
        nodes: &results,
        places: &places,
        workspace: None,
        compiled: None,
    };
    let mut prepared = stream.prepare(work)?;
    let place = |id: TensorId| {
        let place = places.get(id.index()).and_then(Option::as_ref);
        place.ok_or_else(|| Error::invalid("a tensor has no place"))
    };
    let values = [0, 1]
        .map(|number| -> Vec<f32> { (0..LENGTH * ROWS).map(|i| element(number, i)).collect() });
    for (id, values) in [x, w].into_iter().zip(&values) {
        stream.write(place(id)?, 0, bytemuck::cast_slice(values))?;
    }
    let control = RunControl {
        cancel: &CancelToken::new(),
        observer: None,
    };
    stream.run(&mut *prepared, control)?;
    let mut right = true;
    for (id, expected) in results.into_iter().zip(expected(&values)) {
        let mut found = vec![0f32; expected.len()];
        stream.read(place(id)?, 0, bytemuck::cast_slice_mut(&mut found))?;
        right &= found.iter().zip(&expected).all(|(found, expected)| {
            (f64::from(*found) - expected).abs() <= 1e-4 * (1.0 + expected.abs())
        });
    }
    Ok(right)
}

/// What must come out, in the order of [`is_right`].
fn expected([x, w]: &[Vec<f32>; 2]) -> [Vec<f64>; 4] {
    let rows = |values: &[f32]| -> Vec<Vec<f64>> {
        let rows = values.chunks(LENGTH);
        rows.map(|row| row.iter().map(|&x| x.into()).collect())
            .collect()
    };
    let (x, w) = (rows(x), rows(w));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let norm = x.iter().flat_map(|row| {
        let scale = (dot(row, row) / row.len() as f64 + f64::from(EPS)).sqrt();
        row.iter().map(move |x| x / scale)
    });
    let soft_max = x.iter().flat_map(|row| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(move |x| x.exp() / sum)
    });
    let sums = x.iter().map(|row| row.iter().sum());
    let products = x.iter().flat_map(|x| w.iter().map(|w| dot(w, x)));
    [
        norm.collect(),
        soft_max.collect(),
        sums.collect(),
        products.collect(),
    ]
}
