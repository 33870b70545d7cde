//! Description of an image encoder: hyperparameters, from a file's metadata.

use crate::error::{Error, Result};
use crate::keys::Keys;
use crate::projector::Projector;
use crate::sizes::{ImageSize, dynamic_size, filled_size, longest_side_size};
use crate::tiles::{TilePlan, Tiling};
use samite_core::Unary;
use samite_gguf::Metadata;
use samite_llm::Model;

/// Architecture name of mmproj files.
pub const ARCHITECTURE: &str = "clip";

/// Norm of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norm {
    /// LayerNorm.
    Layer,
    /// RMSNorm.
    Rms,
    /// LayerNorm with a bias, RMSNorm without one: files do not tell it in another way.
    LayerIfBiased,
}

/// Windows of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Width and height, in patches.
    pub size: usize,
    /// Every layer with a number that is a multiple of this, counted from 1, attends to all
    /// patches.
    pub full_every: usize,
}

/// Description of an image encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionSpec {
    /// Projector.
    pub projector: Projector,
    /// Width of the vision transformer.
    pub n_embd: usize,
    /// Number of attention heads.
    pub n_head: usize,
    /// Number of layers.
    pub n_layer: usize,
    /// Elements of a row that the language model gets, without those of DeepStack.
    pub projection_dim: usize,
    /// Width and height of a patch, in pixels.
    pub patch_size: usize,
    /// Width and height of the patches that become one row.
    pub merge: usize,
    /// Size to which images are resized, or that of a tile.
    pub image_size: ImageSize,
    /// Method of dividing images into tiles. `None` for encoders that encode images as a whole.
    pub tiling: Option<Tiling>,
    /// Layers whose results go to the first layers of the language model.
    pub deepstack: Vec<usize>,
    pub(crate) eps: f32,
    pub(crate) norm: Norm,
    pub(crate) activation: Unary,
    /// Patches in each direction of the table of positions.
    pub(crate) table_side: usize,
    pub(crate) windows: Option<Windows>,
    pub(crate) mean: [f32; 3],
    pub(crate) std: [f32; 3],
}

/// Maximum number of patches of an image.
const MAX_PATCHES: usize = 1 << 18;

/// Widths of the language models of Gemma 4 whose image tokens attend to earlier ones only: those
/// of E2B and E4B.
const GEMMA4_CAUSAL: [usize; 2] = [1536, 2560];

/// Maximum number of layers.
const MAX_LAYERS: usize = 1024;

impl VisionSpec {
    /// Reads the description. `tokens` replaces the bounds of the number of rows that an image
    /// becomes; a bound of `None` is the model's.
    ///
    /// # Errors
    /// Returns an error that names the missing, wrong or contradictory key.
    pub fn from_metadata(metadata: &Metadata, tokens: [Option<usize>; 2]) -> Result<Self> {
        let architecture = metadata.require::<&str>(samite_gguf::KEY_ARCHITECTURE)?;
        if architecture != ARCHITECTURE {
            return Err(Error::model(format!(
                "the architecture is {architecture:?}, that of an mmproj file is {ARCHITECTURE:?}"
            )));
        }
        if !metadata.get_or("clip.has_vision_encoder", true)? {
            return Err(Error::model(
                "the file has no image encoder (clip.has_vision_encoder)",
            ));
        }
        let name = match metadata.get::<&str>("clip.projector_type")? {
            Some(name) => name,
            None => metadata.require("clip.vision.projector_type")?,
        };
        // Qwen2.5-Omni names both of its encoders alike.
        let name = if name == "qwen2.5o" {
            "qwen2.5vl_merger"
        } else {
            name
        };
        let projector = Projector::from_name(name)?;
        let keys = Keys(metadata);
        let n_embd = keys.count("embedding_length")?;
        let n_head = keys.count("attention.head_count")?;
        if !n_embd.is_multiple_of(4 * n_head) {
            return Err(Error::model(format!(
                "clip.vision.embedding_length is {n_embd}, not a multiple of four times {n_head} heads"
            )));
        }
        let patch_size = keys.count("patch_size")?;
        let merge = keys.merge(projector)?;
        let side = keys.count("image_size")?;
        let unit = patch_size * merge;
        let image_size = keys.image_size(projector, tokens, [side, merge, patch_size])?;
        let tiling = keys.tiling(projector, &image_size, patch_size)?;
        let windows = match projector {
            Projector::Qwen25Vl => {
                let size = keys.optional_count("window_size")?.unwrap_or(112);
                let full_every = keys.optional_count("n_wa_pattern")?;
                let full_every = full_every
                    .ok_or_else(|| Error::model("clip.vision.n_wa_pattern is missing"))?;
                // Windows consist of whole rows of the result.
                let size = (size / unit).max(1) * merge;
                Some(Windows { size, full_every })
            }
            _ => None,
        };
        let patches = image_size.max_pixels() / (patch_size * patch_size);
        if patches > MAX_PATCHES {
            return Err(Error::model(format!(
                "an image would have {patches} patches of {patch_size} x {patch_size} pixels, at most {MAX_PATCHES} are supported"
            )));
        }
        let n_layer = keys.count("block_count")?;
        if n_layer > MAX_LAYERS {
            return Err(Error::model(format!(
                "clip.vision.block_count is {n_layer}, at most {MAX_LAYERS} are supported"
            )));
        }
        let n_layer = keys.feature_layers(projector, n_layer)?;
        let flags = metadata.get::<&[bool]>("clip.vision.is_deepstack_layers")?;
        let layers = flags.unwrap_or_default().iter().enumerate();
        let layers = layers.filter(|(_, is_deep)| **is_deep);
        let deepstack: Vec<usize> = layers.map(|(layer, _)| layer).collect();
        if deepstack.iter().any(|&layer| layer >= n_layer) {
            return Err(Error::model(format!(
                "clip.vision.is_deepstack_layers has more layers than the {n_layer} of clip.vision.block_count"
            )));
        }
        let mut mean = keys.channels("image_mean")?;
        let mut std = keys.channels("image_std")?;
        if projector == Projector::Gemma4V {
            // Elements from 0 to 1 become those from -1 to 1.
            for (mean, std) in mean.iter_mut().zip(&mut std) {
                *std *= 0.5;
                *mean += *std;
            }
        }
        Ok(VisionSpec {
            projector,
            n_embd,
            n_head,
            n_layer,
            projection_dim: keys.count("projection_dim")?,
            patch_size,
            merge,
            image_size,
            tiling,
            deepstack,
            eps: keys.epsilon()?,
            norm: match projector {
                Projector::Qwen25Vl | Projector::Pixtral | Projector::Gemma4V => Norm::Rms,
                Projector::InternVl => Norm::LayerIfBiased,
                _ => Norm::Layer,
            },
            activation: keys.activation(projector)?,
            table_side: (side / patch_size).max(1),
            windows,
            mean,
            std,
        })
    }

    /// Returns the tiles of an image of `width` x `height` pixels.
    pub fn tiles(&self, width: usize, height: usize) -> TilePlan {
        let size = [width, height];
        let whole = match &self.image_size {
            ImageSize::Fixed(side) => [*side; 2],
            ImageSize::Dynamic { unit, pixels } => dynamic_size(size, *unit, pixels),
            ImageSize::LongestSide { unit, longest } => longest_side_size(size, *unit, *longest),
            ImageSize::Filled {
                unit,
                count,
                longest,
            } => filled_size(size, *unit, *count, *longest),
        };
        let mut plan = TilePlan::whole(whole, self.projector.filter());
        if self.projector == Projector::Mlp {
            plan = plan.in_square(self.mean.map(|mean| (mean * 255.0) as u8));
        }
        match &self.tiling {
            Some(tiling) => plan.tiled(tiling, size),
            None => plan,
        }
    }

    /// Returns the numbers of columns and rows of tokens of a tile of `size` pixels.
    pub fn grid(&self, size: [usize; 2]) -> [usize; 2] {
        size.map(|extent| extent / (self.patch_size * self.merge))
    }

    /// Returns whether the tokens of an image attend to each other in both directions in the
    /// language model.
    pub fn is_bidirectional(&self) -> bool {
        match self.projector {
            Projector::Gemma3 => true,
            // Files do not tell: those of the small models do not.
            Projector::Gemma4V => !GEMMA4_CAUSAL.contains(&self.projection_dim),
            _ => false,
        }
    }

    /// Returns the number of tokens of a tile of `size` pixels.
    pub fn token_count(&self, size: [usize; 2]) -> usize {
        let [columns, rows] = self.grid(size);
        let breaks = if self.projector.has_breaks() {
            rows.saturating_sub(1)
        } else {
            0
        };
        columns * rows + breaks
    }

    /// Returns the largest grid of a tile.
    pub fn largest_grid(&self) -> [usize; 2] {
        let whole = match &self.image_size {
            ImageSize::Fixed(side) => self.grid([*side; 2]),
            ImageSize::Dynamic { unit, pixels } => [pixels.end() / (unit * unit), 1],
            ImageSize::LongestSide { unit, longest } => [longest.div_ceil(*unit); 2],
            ImageSize::Filled { count, .. } => [*count, 1],
        };
        let tile = match &self.tiling {
            Some(Tiling::LargeOnly { side, .. }) => self.grid([*side; 2]),
            _ => whole,
        };
        let count = |[columns, rows]: [usize; 2]| columns * rows;
        if count(tile) > count(whole) {
            tile
        } else {
            whole
        }
    }

    /// Returns the largest grids for which memory is reserved: as wide as possible, and nearly
    /// square.
    pub(crate) fn largest_grids(&self) -> Vec<[usize; 2]> {
        let largest = self.largest_grid();
        let [columns, rows] = largest;
        let side = (columns * rows).isqrt().max(1);
        let mut grids = vec![largest];
        if rows == 1 && side > 1 {
            // The sides are no multiples of a window, which takes more memory.
            grids.push([side, columns / side]);
        }
        grids
    }

    /// Returns the maximum number of tokens of an image that a language model computes at once,
    /// because they attend to each other: 0 if they do not.
    pub fn tokens_at_once(&self) -> usize {
        let [columns, rows] = self.largest_grid();
        if self.is_bidirectional() {
            columns * rows
        } else {
            0
        }
    }

    /// Checks that `model` can read the rows of an encoder with this name.
    ///
    /// # Errors
    /// Returns an error if they have another number of elements, or positions that the model does
    /// not have.
    pub fn check(&self, encoder: &str, model: &Model) -> Result<()> {
        let path = model.path().display();
        let (width, wanted) = (self.row_width(), model.spec().input_width());
        if width != wanted {
            return Err(Error::model(format!(
                "{encoder}: an image's rows have {width} elements, and those of {path} have {wanted}: it is the encoder of another model"
            )));
        }
        if self.projector.has_grid_positions() && !model.spec().has_axes() {
            return Err(Error::model(format!(
                "{encoder}: an image's rows have positions on several axes, and {path} has no rope.dimension_sections: it is the encoder of another model"
            )));
        }
        Ok(())
    }

    /// Returns the number of elements of a row, with those of DeepStack.
    pub fn row_width(&self) -> usize {
        self.projection_dim * (1 + self.deepstack.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(changes: &[(&str, samite_gguf::Value)]) -> Metadata {
        let mut metadata = Metadata::new();
        for (key, value) in [
            ("general.architecture", ARCHITECTURE),
            ("clip.projector_type", "qwen2.5vl_merger"),
        ] {
            metadata.set(key, value).unwrap();
        }
        for (key, value) in [
            ("embedding_length", 64u32),
            ("attention.head_count", 2),
            ("block_count", 3),
            ("patch_size", 14),
            ("image_size", 56),
            ("projection_dim", 32),
            ("n_wa_pattern", 2),
        ] {
            metadata.set(&format!("clip.vision.{key}"), value).unwrap();
        }
        let eps = "clip.vision.attention.layer_norm_epsilon";
        metadata.set(eps, 1e-6f32).unwrap();
        for key in ["clip.vision.image_mean", "clip.vision.image_std"] {
            metadata.set(key, vec![0.5f32; 3]).unwrap();
        }
        for (key, value) in changes {
            metadata.set(key, value.clone()).unwrap();
        }
        metadata
    }

    #[test]
    fn images_of_small_gemma_4_models_are_read_in_order() {
        for (projector, width, is_bidirectional) in [
            ("gemma4v", 1536u32, false),
            ("gemma4v", 2560, false),
            ("gemma4v", 5376, true),
            ("gemma3", 2560, true),
            ("idefics3", 960, false),
        ] {
            let changes = [
                ("clip.projector_type", projector.into()),
                ("clip.vision.projection_dim", width.into()),
            ];
            let spec = VisionSpec::from_metadata(&metadata(&changes), [None, None]).unwrap();
            assert_eq!(
                spec.is_bidirectional(),
                is_bidirectional,
                "{projector} {width}"
            );
        }
    }

    #[test]
    fn no_image_of_pixtral_exceeds_the_maximum_of_tokens() {
        let changes = [
            ("clip.projector_type", "pixtral".into()),
            ("clip.vision.image_size", 1540u32.into()),
            ("clip.vision.spatial_merge_size", 2u32.into()),
        ];
        for most in [1, 2, 4, 5, 6, 11, 12, 300] {
            let tokens = [Some(1), Some(most)];
            let spec = VisionSpec::from_metadata(&metadata(&changes), tokens).unwrap();
            for [width, height] in [[1, 1], [20_000, 1], [1, 20_000], [3000, 3000], [900, 1600]] {
                for size in spec.tiles(width, height).sizes() {
                    let count = spec.token_count(size);
                    assert!((1..=most).contains(&count), "{width} x {height}: {count}");
                }
            }
        }
        for (tokens, least) in [(11, 11), (12, 11), (10, 5)] {
            let tokens = [None, Some(tokens)];
            let spec = VisionSpec::from_metadata(&metadata(&changes), tokens).unwrap();
            assert_eq!(spec.token_count(spec.tiles(999, 999).sizes()[0]), least);
        }
    }

    #[test]
    fn odd_descriptions_are_refused_by_their_key() {
        let spec = VisionSpec::from_metadata(&metadata(&[]), [None, None]).unwrap();
        assert_eq!(spec.projector, Projector::Qwen25Vl);
        assert_eq!(spec.largest_grid(), [4096, 1]);
        let windows = Windows {
            size: 8,
            full_every: 2,
        };
        assert_eq!(spec.windows, Some(windows));
        let vision = |key: &str| format!("clip.vision.{key}");
        for (key, value, named) in [
            ("general.architecture".to_owned(), "llama".into(), "clip"),
            (
                "clip.projector_type".to_owned(),
                "ldp".into(),
                "qwen2vl_merger",
            ),
            (
                "clip.has_vision_encoder".to_owned(),
                false.into(),
                "has_vision_encoder",
            ),
            ("clip.use_gelu".to_owned(), 1u32.into(), "use_gelu"),
            (vision("embedding_length"), 65u32.into(), "embedding_length"),
            (vision("embedding_length"), 0u32.into(), "embedding_length"),
            (
                vision("attention.head_count"),
                u32::MAX.into(),
                "head_count",
            ),
            (vision("block_count"), 1025u32.into(), "block_count"),
            (vision("patch_size"), 65_536u32.into(), "--image-max-tokens"),
            (
                vision("spatial_merge_size"),
                65_536u32.into(),
                "--image-max-tokens",
            ),
            (vision("n_wa_pattern"), 0u32.into(), "n_wa_pattern"),
            (vision("image_mean"), vec![0.5f32; 2].into(), "image_mean"),
            (vision("image_mean"), vec![f32::NAN; 3].into(), "image_mean"),
            (vision("image_std"), vec![0.0f32; 3].into(), "image_std"),
            (vision("image_std"), vec![1e-45f32; 3].into(), "image_std"),
            (
                vision("attention.layer_norm_epsilon"),
                f32::INFINITY.into(),
                "epsilon",
            ),
            (
                vision("attention.layer_norm_epsilon"),
                0.0f32.into(),
                "epsilon",
            ),
            (
                vision("is_deepstack_layers"),
                vec![true; 4].into(),
                "is_deepstack_layers",
            ),
        ] {
            let error = VisionSpec::from_metadata(&metadata(&[(&key, value)]), [None, None]);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(named), "{key}: {error}");
        }
        for tokens in [[Some(9), Some(8)], [Some(0), None], [None, Some(1 << 20)]] {
            let error = VisionSpec::from_metadata(&metadata(&[]), tokens);
            assert!(
                error.unwrap_err().to_string().contains("tokens"),
                "{tokens:?}"
            );
        }
        for (projector, key, value, named) in [
            ("idefics3", "preproc_image_size", 8193u32, "preproc_image"),
            (
                "idefics3",
                "preproc_image_size",
                56 * 64 + 1,
                "preproc_image",
            ),
            ("idefics3", "image_size", 57, "image_size"),
            ("pixtral", "image_size", 8179, "8179"),
            ("lfm2", "patch_size", 14, "patch_size"),
            ("internvl", "preproc_max_tiles", 65, "max_tiles"),
            ("internvl", "preproc_min_tiles", 13, "min_tiles"),
            ("internvl", "image_size", 2408, "2408"),
            ("internvl", "projector.scale_factor", 3, "image_size"),
        ] {
            let changes = [
                ("clip.projector_type", projector.into()),
                (&*vision(key), value.into()),
            ];
            let error = VisionSpec::from_metadata(&metadata(&changes), [None, None]);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(named), "{key}: {error}");
        }
        for changes in [
            [("clip.vision.feature_layer", vec![4i32].into())],
            [("clip.vision.feature_layer", vec![1i32, 2].into())],
            [("clip.vision.image_grid_pinpoints", vec![336i32; 2].into())],
        ] {
            let key = changes[0].0;
            let mut metadata = metadata(&changes);
            metadata.set("clip.projector_type", "mlp").unwrap();
            let error = VisionSpec::from_metadata(&metadata, [None, None]);
            assert!(error.unwrap_err().to_string().contains(key));
        }
        let feature_layer = [
            ("clip.projector_type", "mlp".into()),
            ("clip.vision.feature_layer", vec![2i32].into()),
        ];
        let spec = VisionSpec::from_metadata(&metadata(&feature_layer), [None, None]).unwrap();
        assert_eq!(spec.n_layer, 2);
        let fixed = [
            ("clip.projector_type", "gemma3".into()),
            ("clip.vision.image_size", 57u32.into()),
        ];
        let error = VisionSpec::from_metadata(&metadata(&fixed), [None, None]);
        assert!(error.unwrap_err().to_string().contains("image_size"));
    }
}
