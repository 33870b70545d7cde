//! An image encoder on a device.

use crate::error::{Error, Result};
use crate::graph::{self, VisionGraph};
use crate::patches::PatchOrder;
use crate::projector::{PositionTable, Projector};
use crate::rgb::RgbImage;
use crate::sizes::ImageSize;
use crate::spec::VisionSpec;
use crate::weights::EncoderWeights;
use samite_core::{CancelToken, Device, Environment};
use samite_gguf::{GgufFile, LoadMode, LoadOptions};
use samite_llm::MemoryUse;
use samite_sched::{Assignments, Options, Scheduler};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Options of an encoder.
#[derive(Clone, Debug)]
pub struct EncoderOptions {
    /// Devices in order of preference; the last one is the host. The first one gets the weights.
    pub devices: Vec<Arc<dyn Device>>,
    /// Minimum and maximum number of tokens that an image becomes, for encoders whose images have
    /// no fixed size. `None` for the model's. No image is enlarged to reach the minimum if the
    /// encoder's images have a maximum width and height, as Pixtral's do.
    pub tokens: [Option<usize>; 2],
    /// True if devices may repack weights into their own layouts, which are faster.
    pub repack: bool,
    /// Method for loading data into memory.
    pub load_mode: LoadMode,
    /// Source of files, threads and time.
    pub environment: Environment,
}

impl EncoderOptions {
    /// Returns the default options for these devices.
    pub fn new(devices: Vec<Arc<dyn Device>>) -> Self {
        EncoderOptions {
            devices,
            tokens: [None; 2],
            repack: true,
            load_mode: LoadMode::default(),
            environment: Environment::system(),
        }
    }
}

/// Rows of a tile for a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageEmbeddings {
    /// Rows of [`VisionSpec::row_width`] elements, from left to right and top to bottom. With
    /// [`VisionSpec::token_count`] rows, there may be others between those of the grid.
    pub values: Vec<f32>,
    /// Numbers of columns and rows of tokens.
    pub grid: [usize; 2],
}

/// An image encoder: a vision transformer and its projector.
pub struct Encoder {
    spec: VisionSpec,
    weights: EncoderWeights,
    scheduler: Scheduler,
    name: Box<str>,
    loaded: Option<(PatchOrder, VisionGraph)>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("Encoder");
        debug.field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// Returns the graphs for which memory is reserved: those of the largest images, wide and square.
pub(crate) fn reserved<'a>(
    spec: &'a VisionSpec,
    weights: &'a EncoderWeights,
) -> impl Iterator<Item = Result<VisionGraph>> + 'a {
    let build = move |grid: [usize; 2]| {
        let patches = grid.map(|extent| extent * spec.merge);
        Ok(graph::build(
            spec,
            weights,
            &PatchOrder::new(spec, patches),
        )?)
    };
    spec.largest_grids().into_iter().map(build)
}

/// Joins the bytes of weights and of intermediate results by name of the memory.
pub(crate) fn memory_use(
    weights: &BTreeMap<String, usize>,
    compute: impl IntoIterator<Item = (String, usize)>,
) -> Vec<MemoryUse> {
    let mut uses: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for (memory, &bytes) in weights {
        uses.entry(memory.clone()).or_default()[0] += bytes;
    }
    for (memory, bytes) in compute {
        uses.entry(memory).or_default()[1] += bytes;
    }
    uses.retain(|_, bytes| *bytes != [0; 2]);
    let uses = uses.into_iter();
    uses.map(|(memory, [weights, compute])| MemoryUse {
        memory,
        weights,
        compute,
        ..MemoryUse::default()
    })
    .collect()
}

impl Encoder {
    /// Loads the image encoder of an mmproj file.
    ///
    /// # Errors
    /// Returns an error that names the file and the key or tensor that makes it unusable. Also
    /// fails if a device does not have enough memory.
    pub fn load(path: impl AsRef<Path>, options: &EncoderOptions) -> Result<Self> {
        let files = &*options.environment.files;
        let file = GgufFile::open_in(files, path.as_ref(), options.load_mode)?;
        Self::from_gguf(&file, options).map_err(|error| error.in_file(file.path()))
    }

    fn from_gguf(file: &GgufFile, options: &EncoderOptions) -> Result<Self> {
        let mut spec = VisionSpec::from_metadata(file.metadata(), options.tokens)?;
        let Some(device) = options.devices.first() else {
            return Err(Error::model("no device is given"));
        };
        let load = LoadOptions {
            system: &*options.environment.threads,
            in_place: false,
            ..LoadOptions::default()
        };
        let weights = EncoderWeights::load(file, &spec, device, options.repack, &load)?;
        complete(&mut spec, &weights);
        let scheduling = Options {
            environment: options.environment.clone(),
            ..Options::default()
        };
        let mut encoder = Encoder {
            scheduler: Scheduler::new(options.devices.clone(), scheduling)?,
            name: file.path().display().to_string().into(),
            spec,
            weights,
            loaded: None,
        };
        encoder.check()?;
        Ok(encoder)
    }

    /// Checks all tensors with the graph of the smallest image, and reserves memory for the
    /// largest one.
    fn check(&mut self) -> Result<()> {
        let merge = self.spec.merge;
        let small = PatchOrder::new(&self.spec, [merge; 2]);
        let built = graph::build(&self.spec, &self.weights, &small)?;
        if let Some(name) = self
            .weights
            .names()
            .find(|name| !built.used.contains(*name))
        {
            return Err(Error::model(format!(
                "tensor {name:?} is not supported by projector {}: without it, results would be wrong",
                self.spec.projector.name()
            )));
        }
        let width = built.graph.tensor(built.result).layout.shape()[0];
        if width != self.spec.row_width() {
            return Err(Error::model(format!(
                "rows have {width} elements, by clip.vision.projection_dim they must have {}",
                self.spec.row_width()
            )));
        }
        let side = self.spec.table_side;
        let table = self.weights.get("v.position_embd.weight");
        let rows = table.map(|table| table.layout().shape()[1]);
        let class = built.class_rows;
        let is_square = self.spec.projector.table() != PositionTable::Axes;
        if !is_square && (side < self.spec.merge || rows != Some(2 * side)) {
            return Err(Error::model(format!(
                "tensor \"v.position_embd.weight\" has {side} rows for each axis, must have at least {}, and as many for both",
                self.spec.merge
            )));
        }
        if is_square && rows.is_some_and(|rows| rows != side * side + class) {
            return Err(Error::model(format!(
                "tensor \"v.position_embd.weight\" has {} rows, but clip.vision.image_size requires {side} x {side} and {class} for a class token",
                rows.unwrap_or(0)
            )));
        }
        for built in reserved(&self.spec, &self.weights) {
            self.scheduler.reserve(&built?.graph, Assignments::NONE)?;
        }
        Ok(())
    }

    /// Returns the description of the encoder.
    pub fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    /// Returns the name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a hash of the encoder's metadata and weights.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{:?}", self.spec).as_bytes());
        hasher.update(self.weights.hash());
        hasher.finalize().into()
    }

    /// Returns the memory that the encoder uses, by kind of memory.
    pub fn memory(&self) -> Vec<MemoryUse> {
        memory_use(self.weights.bytes(), self.scheduler.buffer_sizes())
    }

    /// Sets the number of threads of the host, or the default.
    pub fn set_threads(&mut self, threads: Option<usize>) {
        self.scheduler.set_threads(threads);
    }

    /// Computes the rows of an image, for each of its [tiles](VisionSpec::tiles). The memory of the
    /// result is allocated anew.
    ///
    /// # Errors
    /// Returns an error if a device fails, or if `cancel` stops it.
    pub fn encode(
        &mut self,
        image: &RgbImage,
        cancel: &CancelToken,
    ) -> Result<Vec<ImageEmbeddings>> {
        let plan = self.spec.tiles(image.width(), image.height());
        let tiles = plan.cut(image)?;
        tiles
            .iter()
            .map(|tile| self.encode_tile(tile, cancel))
            .collect()
    }

    /// Computes the rows of a tile.
    pub(crate) fn encode_tile(
        &mut self,
        tile: &RgbImage,
        cancel: &CancelToken,
    ) -> Result<ImageEmbeddings> {
        let patches = [tile.width(), tile.height()].map(|extent| extent / self.spec.patch_size);
        let loaded = match self.loaded.take() {
            Some(loaded) if loaded.0.grid == patches => loaded,
            _ => {
                let order = PatchOrder::new(&self.spec, patches);
                let built = graph::build(&self.spec, &self.weights, &order)?;
                (order, built)
            }
        };
        self.scheduler
            .load_with(&loaded.1.graph, Assignments::NONE, cancel)?;
        let (order, built) = self.loaded.insert(loaded);
        let scheduler = &mut self.scheduler;
        let pixels = order.pixels(&self.spec, tile);
        scheduler.write(built.pixels, 0, bytemuck::cast_slice(&pixels))?;
        if let Some(input) = built.positions {
            scheduler.write(input, 0, bytemuck::cast_slice(&order.positions()))?;
        }
        let (rows, weights) = order.table_inputs(&self.spec, built.class_rows);
        if let Some(input) = built.table_rows {
            scheduler.write(input, 0, bytemuck::cast_slice(&rows))?;
        }
        if let Some(input) = built.table_weights {
            scheduler.write(input, 0, bytemuck::cast_slice(&weights))?;
        }
        scheduler.run(cancel)?;
        let width = self.spec.row_width();
        let has_breaks = self.spec.projector.has_breaks();
        let mut computed = vec![0.0; (order.rows.len() + usize::from(has_breaks)) * width];
        scheduler.read(built.result, 0, bytemuck::cast_slice_mut(&mut computed))?;
        let grid = patches.map(|extent| extent / self.spec.merge);
        let mut values = vec![0.0; self.spec.token_count([tile.width(), tile.height()]) * width];
        if has_breaks {
            let (_, token) = computed.split_at(order.rows.len() * width);
            for row in values.chunks_exact_mut(width) {
                row.copy_from_slice(token);
            }
        }
        for (row, &place) in computed.chunks_exact(width).zip(&order.rows) {
            let breaks = if has_breaks { place / grid[0] } else { 0 };
            values[(place + breaks) * width..][..width].copy_from_slice(row);
        }
        Ok(ImageEmbeddings { values, grid })
    }
}

/// Completes a description by what only the weights tell.
pub(crate) fn complete(spec: &mut VisionSpec, weights: &EncoderWeights) {
    let rows = |name: &str| weights.get(name).map(|matrix| matrix.layout().shape()[1]);
    if spec.projector == Projector::Mlp {
        // Old files have the width of CLIP's own projection, and count layers that they lack.
        spec.projection_dim = rows("mm.2.weight").unwrap_or(spec.projection_dim);
        let has_layer = |layer: &usize| {
            let name = format!("v.blk.{layer}.ln1.weight");
            weights.get(&name).is_some()
        };
        spec.n_layer = (0..spec.n_layer).take_while(has_layer).count();
    }
    if let ImageSize::Filled { unit, longest, .. } = &mut spec.image_size {
        spec.table_side = rows("v.position_embd.weight").unwrap_or(0) / 2;
        // The table has a row for each patch of the longest side.
        *longest = (*longest).min(spec.table_side * spec.patch_size).max(*unit);
    }
}
