//! The weights of an encoder.

use crate::error::{Error, Result};
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

/// Matrix that files have transposed.
const TRANSPOSED: &str = "mm.input_projection.weight";

/// Prefixes of the names of an image encoder's tensors.
const PREFIXES: [&str; 2] = ["v.", "mm."];

/// Prefix of the names of an audio encoder's projector.
const AUDIO_PREFIX: &str = "mm.a.";

impl EncoderWeights {
    /// Loads the weights of `file` to `device`, into packed memory where `repack` is set and the
    /// device has kernels for it.
    pub fn load(
        file: &GgufFile,
        device: &Arc<dyn Device>,
        repack: bool,
        options: &LoadOptions<'_>,
    ) -> Result<Self> {
        let planned = planned(file, device, repack)?;
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
        Ok(weights)
    }

    /// Returns the weights of `file` without memory, for plans.
    pub fn unallocated(file: &GgufFile, device: &Arc<dyn Device>, repack: bool) -> Result<Self> {
        let planned = planned(file, device, repack)?;
        let mut tensors = BTreeMap::new();
        for planned in &planned {
            let described = planned.described();
            let size = planned.memory.alloc_size(&described)?;
            let buffer = samite_core::unallocated(&planned.memory, size, Usage::Weights);
            let stored = StoredTensor::described(&described, buffer, 0)?;
            tensors.insert(planned.info.name.clone(), stored);
        }
        Ok(EncoderWeights {
            bytes: bytes(&planned)?,
            tensors,
            ..EncoderWeights::default()
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

/// Plans the weights of the image encoder of `file`.
fn planned<'a>(
    file: &'a GgufFile,
    device: &Arc<dyn Device>,
    repack: bool,
) -> Result<Vec<Planned<'a>>> {
    let is_image = |name: &str| {
        PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(AUDIO_PREFIX)
    };
    let tensors = file.tensors().iter();
    let tensors = tensors.filter(|info| is_image(&info.name));
    tensors
        .map(|info| Planned::new(info, device, repack))
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
        device: &Arc<dyn Device>,
        repack: bool,
    ) -> Result<Self> {
        if !info.dtype.is_float() && !info.dtype.is_quantized() {
            return Err(Error::model(format!(
                "tensor {:?} has type {}, which is no type of weights",
                info.name, info.dtype
            )));
        }
        let is_transposed = *info.name == *TRANSPOSED;
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
