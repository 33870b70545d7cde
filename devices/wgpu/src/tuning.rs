//! Finds the sizes that suit an adapter. Nothing that an adapter reports tells which size is
//! fastest, so samite measures it once per adapter and driver.
//!
//! Tuning covers only sizes that do not change results: the rows per workgroup of products with a
//! vector, and the largest tile of products with cooperative matrices. The sum of each element is
//! the same for all of them.

use crate::device::WgpuDevice;
use crate::stream::WgpuStream;
use samite_core::environment::Instant;
use samite_core::{
    CancelToken, DType, Device, Error, Graph, PlacedGraph, Result, RunControl, Stream, TensorGroup,
    TensorId, Usage,
};
use samite_disk_cache::CacheFile;
use std::sync::Arc;
use std::time::Duration;

/// The sizes in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Rows per workgroup of products of packed weights with one column: for few rows, and for
    /// many.
    pub rows: [usize; 2],
    /// Largest tile of products with cooperative matrices, as an index into [`TILES`].
    pub tile: usize,
}

/// Number of rows above which a matrix has many.
pub const MANY_ROWS: usize = 4096;

/// Rows and columns of tiles of products with cooperative matrices.
pub const TILES: [[usize; 2]; 3] = [[128, 128], [128, 64], [64, 64]];

const ROWS: [usize; 4] = [1, 2, 4, 8];

impl Default for Tuning {
    /// Returns sizes that were measured by hand on one card.
    fn default() -> Self {
        Tuning {
            rows: [2, 4],
            tile: 0,
        }
    }
}

impl Tuning {
    fn text(&self) -> String {
        let [few, many] = self.rows;
        format!("rows: {few} {many}, tile: {}\n", self.tile)
    }

    /// Parses the output of [`text`](Tuning::text).
    fn read(text: &str) -> Option<Self> {
        let rows = ROWS.iter().flat_map(|&few| ROWS.map(|many| [few, many]));
        let mut all = rows.flat_map(|rows| (0..TILES.len()).map(move |tile| Tuning { rows, tile }));
        all.find(|tuning| tuning.text() == text)
    }
}

/// A group of products to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Products of packed weights with few rows and one column.
    FewRows,
    /// Products of packed weights with many rows and one column.
    ManyRows,
    /// Products with cooperative matrices.
    Matrices,
}

impl Subject {
    /// Returns the candidates, each with one size of `tuning` changed.
    fn choices(self, tuning: Tuning) -> Vec<Tuning> {
        let rows = |which: usize| {
            let rows = ROWS.iter().map(move |&rows| {
                let mut choice = tuning;
                choice.rows[which] = rows;
                choice
            });
            rows.collect()
        };
        match self {
            Subject::FewRows => rows(0),
            Subject::ManyRows => rows(1),
            Subject::Matrices => (0..TILES.len())
                .map(|tile| Tuning { tile, ..tuning })
                .collect(),
        }
    }
}

/// A size replaces the default only if it takes less than this share of its time. Smaller
/// differences are noise.
const WORTH_WHILE: f64 = 0.97;
/// Measurements per size. The shortest counts.
const TRIES: usize = 4;

/// Returns the sizes for an adapter: the cached ones, or the candidates with the shortest times by
/// `measure`.
///
/// # Errors
/// Returns the errors of `measure`.
pub fn tuned(
    kept: Option<&CacheFile>,
    subjects: &[Subject],
    mut measure: impl FnMut(Subject, Tuning) -> Result<Duration>,
) -> Result<Tuning> {
    let known = kept.and_then(CacheFile::text);
    if let Some(tuning) = known.as_deref().and_then(Tuning::read) {
        return Ok(tuning);
    }
    let mut tuning = Tuning::default();
    for &subject in subjects {
        let choices = subject.choices(tuning);
        let mut shortest = vec![Duration::MAX; choices.len()];
        // Interleave the candidates, so that a disturbance affects all of them.
        for _ in 0..TRIES {
            for (choice, shortest) in choices.iter().zip(&mut shortest) {
                *shortest = measure(subject, *choice)?.min(*shortest);
            }
        }
        let usual = choices.iter().position(|choice| *choice == tuning);
        let usual = usual.map_or(Duration::MAX, |at| shortest[at]);
        let best = choices.iter().zip(&shortest).min_by_key(|(_, time)| **time);
        if let Some((choice, time)) = best
            && time.as_secs_f64() < usual.as_secs_f64() * WORTH_WHILE
        {
            tuning = *choice;
        }
        tracing::debug!("{subject:?}: {shortest:?} for {choices:?}");
    }
    if let Some(kept) = kept {
        kept.write(tuning.text().as_bytes());
    }
    Ok(tuning)
}

/// Returns the sizes for the adapter of `device`.
///
/// # Errors
/// Returns an error if the device is lost. On any other failure, such as too little memory, it
/// returns the default sizes and caches nothing.
pub fn tune(device: &WgpuDevice) -> Result<Tuning> {
    let gpu = device.gpu();
    let kept = gpu.kept("tuning");
    let mut subjects = vec![Subject::FewRows, Subject::ManyRows];
    if device.capacity().matrices {
        subjects.push(Subject::Matrices);
    }
    let mut work: Option<(Subject, ProductBenchmark)> = None;
    let measured = tuned(kept.as_ref(), &subjects, |subject, tuning| {
        let ready = work.take().filter(|(of, _)| *of == subject);
        let (_, ready) = match ready {
            Some(ready) => work.insert(ready),
            None => work.insert((subject, ProductBenchmark::new(device, subject)?)),
        };
        ready.time(device, tuning)
    });
    match measured {
        Err(error) if !matches!(error, Error::DeviceLost { .. }) => {
            tracing::warn!(
                "{}: sizes that suit it are not measured: {error}",
                gpu.name()
            );
            Ok(Tuning::default())
        }
        other => other,
    }
}

/// Products to time.
struct ProductBenchmark {
    graph: Graph,
    products: Vec<TensorId>,
    places: Vec<Option<samite_core::TensorRef>>,
    workspace: TensorGroup,
}

/// Bytes of weights: more than GPU caches hold. Software adapters get less work.
const WEIGHTS: usize = 64 << 20;
const WEIGHTS_OF_SOFTWARE: usize = 1 << 20;

impl ProductBenchmark {
    fn new(device: &WgpuDevice, subject: Subject) -> Result<Self> {
        let (dtype, length, rows, columns) = match subject {
            // Three of these products are one launch.
            Subject::FewRows => (DType::Q4_0, 2048, 1024, 1),
            Subject::ManyRows => (DType::Q4_0, 2048, 2 * MANY_ROWS, 1),
            Subject::Matrices => (DType::F16, 4096, 4096, 512),
        };
        let mut graph = Graph::new();
        let x = graph.input("x", DType::F32, [length, columns, 1, 1])?;
        let bytes = dtype.row_bytes(length)? * rows;
        let all = if device.is_software() {
            WEIGHTS_OF_SOFTWARE
        } else {
            WEIGHTS
        };
        let mut products = Vec::new();
        let mut places = vec![None; 1];
        let memory = device.buffer_type();
        let packed = &device.extra_buffer_types()[0];
        let place = |graph: &Graph, id: TensorId, is_weights: bool| {
            let (memory, usage) = match is_weights {
                true if dtype.is_quantized() => (packed, Usage::Weights),
                true => (&memory, Usage::Weights),
                false => (&memory, Usage::Compute),
            };
            let layout = graph.tensor(id).layout;
            let group = TensorGroup::allocate(memory, usage, &[("", layout)])?;
            let tensor = group.tensors[0].tensor();
            // Halves slightly above one, which are small numbers as floats. Zeros would make an
            // adapter faster than it is.
            tensor.buffer.fill(
                tensor.slot,
                0,
                layout.bytes(),
                if is_weights { 0x3c } else { 0x3d },
            )?;
            Result::Ok(Some(tensor.clone()))
        };
        places[0] = place(&graph, x, false)?;
        for _ in 0..(all / bytes).max(1) {
            let w = graph.leaf("w", dtype, [length, rows, 1, 1])?;
            places.push(place(&graph, w, true)?);
            let y = graph.mul_mat(w, x)?;
            graph.set_output(y);
            places.push(place(&graph, y, false)?);
            products.push(y);
        }
        let bytes = device.workspace(&graph, &products)?.max(4);
        let layout = samite_core::Layout::contiguous(DType::I8, [bytes, 1, 1, 1])?;
        let workspace = TensorGroup::allocate(&memory, Usage::Compute, &[("", layout)])?;
        Ok(ProductBenchmark {
            graph,
            products,
            places,
            workspace,
        })
    }

    /// Returns the duration with these sizes, once everything is compiled.
    fn time(&self, device: &WgpuDevice, tuning: Tuning) -> Result<Duration> {
        let device = Arc::new(device.tuned(tuning));
        let mut stream = WgpuStream::open(device)?;
        let work = PlacedGraph {
            graph: &self.graph,
            nodes: &self.products,
            places: &self.places,
            workspace: Some(self.workspace.tensors[0].tensor()),
            compiled: None,
        };
        let mut prepared = stream.prepare(work)?;
        let mut run = || {
            let control = RunControl {
                cancel: &CancelToken::new(),
                observer: None,
            };
            stream.run(&mut *prepared, control)?;
            stream.synchronize()
        };
        run()?;
        let begin = Instant::now();
        run()?;
        Ok(begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::cache_file;

    const ALL: [Subject; 3] = [Subject::FewRows, Subject::ManyRows, Subject::Matrices];

    fn kept(folder: &tempfile::TempDir, driver: &str) -> CacheFile {
        let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, wgpu::Backend::Vulkan);
        info.driver_info = driver.to_owned();
        cache_file(folder.path(), &info, "tuning")
    }

    fn never(subject: Subject, tuning: Tuning) -> Result<Duration> {
        panic!("{subject:?} was measured with {tuning:?}")
    }

    /// Times of an adapter that prefers one row for few rows, eight for many, and medium tiles.
    fn times(subject: Subject, tuning: Tuning) -> Result<Duration> {
        let micros = match subject {
            Subject::FewRows => 100 + 10 * tuning.rows[0],
            Subject::ManyRows => 100 - 10 * tuning.rows[1],
            Subject::Matrices => [100, 50, 70][tuning.tile],
        };
        Ok(Duration::from_micros(micros as u64))
    }

    #[test]
    fn the_fastest_sizes_are_chosen_and_cached() {
        let folder = tempfile::tempdir().unwrap();
        let kept = |driver| kept(&folder, driver);
        let best = Tuning {
            rows: [1, 8],
            tile: 1,
        };
        assert_eq!(tuned(Some(&kept("1")), &ALL, times).unwrap(), best);
        assert_eq!(tuned(Some(&kept("1")), &ALL, never).unwrap(), best);
        // A new version of the driver is measured. Without a folder, every run measures.
        let other = |_, _| Ok(Duration::from_micros(5));
        let usual = Tuning::default();
        assert_eq!(tuned(Some(&kept("2")), &ALL, other).unwrap(), usual);
        assert_eq!(tuned(Some(&kept("2")), &ALL, never).unwrap(), usual);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        assert_eq!(tuned(None, &ALL, times).unwrap(), best);
        // Features that the adapter lacks are not measured.
        let without = Tuning { tile: 0, ..best };
        assert_eq!(tuned(None, &ALL[..2], times).unwrap(), without);
    }

    #[test]
    fn damaged_tuning_files_cause_a_new_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(&folder, "1");
        let best = tuned(None, &ALL, times).unwrap();
        for text in [
            "",
            "rows: 3 4, tile: 0\n",
            "rows: 1 8, tile: 9\n",
            "rows: 1 8, tile: 1",
            "\0",
        ] {
            kept.write(text.as_bytes());
            assert_eq!(tuned(Some(&kept), &ALL, times).unwrap(), best, "{text:?}");
            assert_eq!(tuned(Some(&kept), &ALL, never).unwrap(), best, "{text:?}");
        }
        kept.write(&[0xff, 0xfe]);
        assert_eq!(tuned(Some(&kept), &ALL, times).unwrap(), best);
    }

    /// A disturbance makes a size slow once, but never fast. Small differences are ignored.
    #[test]
    fn noise_does_not_change_the_choice() {
        let mut count = 0;
        let disturbed = tuned(None, &ALL, |subject, tuning| {
            count += 1;
            let factor = if count % 7 == 0 { 9 } else { 1 };
            Ok(times(subject, tuning)? * factor)
        });
        assert_eq!(disturbed.unwrap(), tuned(None, &ALL, times).unwrap());
        let alike = |_, tuning: Tuning| {
            let usual = tuning == Tuning::default();
            Ok(Duration::from_micros(if usual { 1000 } else { 980 }))
        };
        assert_eq!(tuned(None, &ALL, alike).unwrap(), Tuning::default());
    }

    #[test]
    fn a_failing_adapter_caches_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(&folder, "1");
        let fails = |subject, tuning| match subject {
            Subject::FewRows => times(subject, tuning),
            _ => Err(Error::device("gpu", "it fails")),
        };
        assert!(tuned(Some(&kept), &ALL, fails).is_err());
        assert_eq!(kept.read(), None);
    }
}
