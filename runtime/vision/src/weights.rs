//! The weights of an encoder.

use crate::error::{Error, Result};
use crate::projector::Projector;
use crate::spec::VisionSpec;
use samite_core::{
    BufferType, DType, Device, Graph, Layout, StoredTensor, TensorGroup, TensorInfo, Usage,
    same_buffer_type,
};
use samite_gguf::{GgufFile, LoadOptions};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Weights by name.
#[derive(Debug, Default)]
pub(crate) struct EncoderWeights {
    tensors: BTreeMap<Box<str>, Arc<StoredTensor>>,
    /// Minima and maxima of the elements that matrices read and write, by the names of their
    /// tensors.
    bounds: BTreeMap<Box<str>, f32>,
    /// Bytes by name of the memory.
    bytes: BTreeMap<String, usize>,
    /// Combined hash of all names and data.
    hash: [u8; 32],
}

/// A weight before it is loaded.
struct Planned<'a> {
    info: &'a samite_gguf::TensorInfo,
    layout: Layout,
    is_transposed: bool,
    memory: Arc<dyn BufferType>,
}

/// Ends of the names of bounds, in place of that of a matrix.
const BOUNDS: [&str; 4] = ["input_min", "input_max", "output_min", "output_max"];

/// Matrix that files of Gemma 3 have transposed.
const TRANSPOSED: &str = "mm.input_projection.weight";

/// Prefixes of the names of an image encoder's tensors.
const PREFIXES: [&str; 2] = ["v.", "mm."];

/// Prefix of the names of an audio encoder's projector.
const AUDIO_PREFIX: &str = "mm.a.";

impl EncoderWeights {
    /// Loads the weights of `file`, for an encoder with this description, to `device`: into packed
    /// memory where `repack` is set and the device has kernels for it.
    pub fn load(
        file: &GgufFile,
        spec: &VisionSpec,
        device: &Arc<dyn Device>,
        repack: bool,
        options: &LoadOptions<'_>,
    ) -> Result<Self> {
        let planned = planned(file, spec, device, repack)?;
        let mut weights = EncoderWeights {
            bytes: bytes(&planned)?,
            ..EncoderWeights::default()
        };
        let mut rest: Vec<&Planned<'_>> = planned.iter().collect();
        while let Some(first) = rest.first() {
            let memory = Arc::clone(&first.memory);
            let (group, others) = rest
                .into_iter()
                .partition::<Vec<_>, _>(|planned| same_buffer_type(&planned.memory, &memory));
            rest = others;
            let infos: Vec<_> = group.iter().map(|planned| planned.described()).collect();
            let bytes = TensorGroup::planned_size(&memory, &infos)?;
            device.check_free(bytes, "the image encoder")?;
            let stored = TensorGroup::allocate_described(&memory, Usage::Weights, &infos)?;
            let names = group.iter().map(|planned| planned.info.name.clone());
            weights.tensors.extend(names.zip(stored.tensors));
        }
        let transposed: Vec<_> = planned
            .iter()
            .filter(|planned| planned.is_transposed)
            .map(|planned| &planned.info.name)
            .collect();
        let hash = Mutex::new([0; 32]);
        file.load(
            planned.iter().map(|planned| planned.info),
            options,
            |info, bytes| {
                let Some(stored) = weights.tensors.get(&info.name) else {
                    return Ok(());
                };
                let mut hasher = blake3::Hasher::new();
                let described = format!("{} {} {:?}\n", info.name, info.dtype, info.shape);
                hasher.update(described.as_bytes()).update(bytes);
                let own = hasher.finalize();
                // Threads load tensors in any order.
                let mut all = hash.lock().unwrap_or_else(PoisonError::into_inner);
                all.iter_mut()
                    .zip(own.as_bytes())
                    .for_each(|(all, own)| *all ^= own);
                drop(all);
                if transposed.contains(&&info.name) {
                    let element = bytes.len() / info.elements().max(1);
                    let transposed_bytes = transposed_bytes(bytes, info.shape[0], element);
                    return Ok(stored.tensor().write(0, &transposed_bytes)?);
                }
                Ok::<_, Error>(stored.tensor().write(0, bytes)?)
            },
        )?;
        weights.hash = hash.into_inner().unwrap_or_else(PoisonError::into_inner);
        weights.read_bounds()?;
        Ok(weights)
    }

    /// Returns the weights of `file` without memory, for plans. Of bounds, only their names are
    /// known.
    pub fn unallocated(
        file: &GgufFile,
        spec: &VisionSpec,
        device: &Arc<dyn Device>,
        repack: bool,
    ) -> Result<Self> {
        let planned = planned(file, spec, device, repack)?;
        let mut weights = EncoderWeights {
            bytes: bytes(&planned)?,
            ..EncoderWeights::default()
        };
        for planned in &planned {
            let name = planned.info.name.clone();
            if is_bound(&name) {
                weights.bounds.insert(name, 0.0);
                continue;
            }
            let described = planned.described();
            let size = planned.memory.alloc_size(&described)?;
            let buffer = samite_core::unallocated(&planned.memory, size, Usage::Weights);
            let stored = StoredTensor::described(&described, buffer, 0)?;
            weights.tensors.insert(name, stored);
        }
        Ok(weights)
    }

    /// Takes the bounds of elements from the tensors.
    fn read_bounds(&mut self) -> Result<()> {
        let names = self.tensors.keys().filter(|name| is_bound(name));
        for name in names.cloned().collect::<Vec<_>>() {
            let Some(stored) = self.tensors.remove(&name) else {
                continue;
            };
            let layout = stored.layout();
            let mut value = [0; 4];
            if layout.dtype() != DType::F32 || layout.shape() != [1; 4] {
                return Err(Error::model(format!(
                    "tensor {name:?} is not one element of type F32"
                )));
            }
            stored.tensor().read(0, &mut value)?;
            self.bounds.insert(name, f32::from_le_bytes(value));
        }
        Ok(())
    }

    /// Returns the bounds of the elements that the matrix called `name` reads and writes, if it has
    /// any.
    pub fn bounds(&self, name: &str) -> [Option<[f32; 2]>; 2] {
        let stem = name.strip_suffix("weight").unwrap_or(name);
        let bound = |end: &str| self.bounds.get(&*format!("{stem}{end}")).copied();
        ["input", "output"].map(|kind| {
            let [min, max] = ["min", "max"].map(|end| bound(&format!("{kind}_{end}")));
            let min = min.unwrap_or(f32::NEG_INFINITY);
            let max = max.unwrap_or(f32::INFINITY);
            (min > f32::NEG_INFINITY || max < f32::INFINITY).then_some([min, max])
        })
    }

    /// Returns the weight called `name`, if the file has it.
    pub fn get(&self, name: &str) -> Option<&Arc<StoredTensor>> {
        self.tensors.get(name)
    }

    /// Returns the names of all weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    /// Returns a hash of all names and data.
    pub fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Returns the bytes that they take, by name of the memory.
    pub fn bytes(&self) -> &BTreeMap<String, usize> {
        &self.bytes
    }
}

fn is_bound(name: &str) -> bool {
    BOUNDS.iter().any(|end| name.ends_with(end))
}

/// Plans the weights of the image encoder of `file`.
fn planned<'a>(
    file: &'a GgufFile,
    spec: &VisionSpec,
    device: &Arc<dyn Device>,
    repack: bool,
) -> Result<Vec<Planned<'a>>> {
    let is_image = |name: &str| {
        PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(AUDIO_PREFIX)
    };
    let tensors = file.tensors().iter();
    let tensors = tensors.filter(|info| is_image(&info.name));
    tensors
        .map(|info| Planned::new(info, spec, device, repack))
        .collect()
}

/// Returns the bytes by name of the memory.
fn bytes(planned: &[Planned<'_>]) -> Result<BTreeMap<String, usize>> {
    let mut bytes = BTreeMap::new();
    for planned in planned {
        let described = [planned.described()];
        for (name, size) in TensorGroup::planned_by_memory(&planned.memory, &described)? {
            *bytes.entry(name).or_insert(0) += size;
        }
    }
    Ok(bytes)
}

impl<'a> Planned<'a> {
    fn described(&self) -> TensorInfo<'_> {
        TensorInfo::new(&self.info.name, self.layout, Usage::Weights)
    }

    fn new(
        info: &'a samite_gguf::TensorInfo,
        spec: &VisionSpec,
        device: &Arc<dyn Device>,
        repack: bool,
    ) -> Result<Self> {
        if !info.dtype.is_float() && !info.dtype.is_quantized() {
            return Err(Error::model(format!(
                "tensor {:?} has type {}, which is no type of weights",
                info.name, info.dtype
            )));
        }
        let is_transposed = *info.name == *TRANSPOSED && spec.projector == Projector::Gemma3;
        if is_transposed && info.dtype.block_len() != 1 {
            return Err(Error::model(format!(
                "tensor {TRANSPOSED:?} has type {}, and only types without blocks can be transposed",
                info.dtype
            )));
        }
        let [n0, n1, n2, n3] = info.shape;
        let shape = if info.name.starts_with("v.patch_embd.weight") {
            // Patches do not overlap, so that their convolution is a matrix product.
            [n0 * n1 * n2, n3, 1, 1]
        } else if is_transposed {
            [n1, n0, 1, 1]
        } else if *info.name == *"v.position_embd.weight" {
            // Gemma 4 has one table for each axis.
            [n0, n1 * n2, n3, 1]
        } else {
            info.shape
        };
        let layout = Layout::contiguous(info.dtype, shape)?;
        let is_matrix = shape[1] > 1 && !info.name.ends_with("position_embd.weight");
        let packed = (repack && is_matrix)
            .then(|| packed_memory(device, info.dtype, shape))
            .transpose()?
            .flatten();
        Ok(Planned {
            info,
            layout,
            is_transposed,
            memory: packed.unwrap_or_else(|| device.buffer_type()),
        })
    }
}

/// Returns the memory in which the device has packed kernels for such a matrix.
fn packed_memory(
    device: &Arc<dyn Device>,
    dtype: DType,
    shape: [usize; 4],
) -> Result<Option<Arc<dyn BufferType>>> {
    let mut graph = Graph::new();
    let matrix = graph.leaf("matrix", dtype, shape)?;
    let x = graph.input("x", DType::F32, [shape[0], 1, 1, 1])?;
    let product = graph.mul_mat(matrix, x)?;
    let mut memories = device.extra_buffer_types().into_iter();
    Ok(memories.find(|memory| memory.accepts(graph.node(product)).is_yes()))
}

/// Returns a matrix with rows of `width` elements transposed.
fn transposed_bytes(bytes: &[u8], width: usize, element: usize) -> Vec<u8> {
    let row = width * element;
    let mut transposed_bytes = Vec::with_capacity(bytes.len());
    for column in 0..width {
        for values in bytes.chunks_exact(row) {
            transposed_bytes.extend(&values[column * element..][..element]);
        }
    }
    transposed_bytes
}
