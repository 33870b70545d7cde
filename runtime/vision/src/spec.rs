//! Description of an image encoder: hyperparameters, from a file's metadata.

use crate::error::{Error, Result};
use crate::resample::MAX_EXTENT;
use samite_core::Unary;
use samite_gguf::Metadata;
use std::ops::RangeInclusive;

/// Architecture name of mmproj files.
pub const ARCHITECTURE: &str = "clip";

/// Projector: turns the result of the vision transformer into rows for the language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projector {
    /// Qwen2-VL: 2 x 2 patches become one row of a two-layer network.
    Qwen2Vl,
    /// Qwen2.5-VL: as Qwen2-VL; most layers attend within windows.
    Qwen25Vl,
    /// Qwen3-VL and Qwen3.5: as Qwen2-VL, with rows for the first layers of the language model
    /// (DeepStack).
    Qwen3Vl,
    /// Gemma 3: means of 4 x 4 patches, a norm, and a matrix.
    Gemma3,
}

impl Projector {
    const ALL: [(Projector, &str); 4] = [
        (Projector::Qwen2Vl, "qwen2vl_merger"),
        (Projector::Qwen25Vl, "qwen2.5vl_merger"),
        (Projector::Qwen3Vl, "qwen3vl_merger"),
        (Projector::Gemma3, "gemma3"),
    ];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        let known = Self::ALL.iter().find(|(projector, _)| *projector == self);
        known.map_or("", |(_, name)| name)
    }

    fn from_name(name: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, known)| *known == name);
        known.map(|(projector, _)| *projector).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(_, name)| *name).collect();
            let names = names.join(", ");
            let message = format!("projector {name:?} is not supported; supported are {names}");
            Error::Unsupported(message.into())
        })
    }

    /// Returns the texts that a prompt has before and after an image's rows.
    pub fn delimiters(self) -> [&'static str; 2] {
        match self {
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl => {
                ["<|vision_start|>", "<|vision_end|>"]
            }
            Projector::Gemma3 => ["<start_of_image>", "<end_of_image>"],
        }
    }

    /// Returns whether the rows have positions of a grid in the language model (M-RoPE).
    pub fn has_grid_positions(self) -> bool {
        !matches!(self, Projector::Gemma3)
    }

    /// Returns whether the tokens of an image attend to each other in both directions in the
    /// language model.
    pub fn is_bidirectional(self) -> bool {
        matches!(self, Projector::Gemma3)
    }
}

/// Size to which images are resized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSize {
    /// This width and height.
    Fixed(usize),
    /// The image's own aspect ratio, in multiples of `unit`, with a number of pixels in `pixels`.
    Dynamic {
        /// Width and height of the patches that become one row.
        unit: usize,
        /// Number of pixels.
        pixels: RangeInclusive<usize>,
    },
}

/// Norm of the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norm {
    Layer,
    Rms,
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
    /// Size to which images are resized.
    pub image_size: ImageSize,
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

/// Default bounds of the number of rows that an image becomes, for dynamic sizes.
const DEFAULT_TOKENS: RangeInclusive<usize> = 8..=4096;

/// Maximum value of a hyperparameter. Products of four fit into `usize`.
const MAX_VALUE: u32 = 1 << 16;

/// Maximum number of pixels to which an image is resized.
const MAX_PIXELS: usize = 64 << 20;

/// Maximum width and height of images with a fixed size.
const MAX_SIDE: usize = 8192;

/// Maximum number of patches of an image.
const MAX_PATCHES: usize = 1 << 18;

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
        let default_merge = match projector {
            Projector::Gemma3 => 4,
            _ => 2,
        };
        let merge = match projector {
            Projector::Gemma3 => keys.optional_count("projector.scale_factor")?,
            _ => keys.optional_count("spatial_merge_size")?,
        };
        let merge = merge.unwrap_or(default_merge);
        let side = keys.count("image_size")?;
        let unit = patch_size * merge;
        let image_size = match projector {
            Projector::Gemma3 if side.is_multiple_of(unit) && side <= MAX_SIDE => {
                ImageSize::Fixed(side)
            }
            Projector::Gemma3 => {
                return Err(Error::model(format!(
                    "clip.vision.image_size is {side}, must be a multiple of {merge} patches of {patch_size}, at most {MAX_SIDE}"
                )));
            }
            _ => {
                let [least, most] = tokens;
                let most = most.unwrap_or(*DEFAULT_TOKENS.end());
                let least = least.unwrap_or(most.min(*DEFAULT_TOKENS.start()));
                if least > most || least == 0 || most > MAX_VALUE as usize {
                    return Err(Error::model(format!(
                        "an image cannot become from {least} to {most} tokens: from 1 to {MAX_VALUE}, in order"
                    )));
                }
                let most_pixels = most.saturating_mul(unit).saturating_mul(unit);
                if most_pixels > MAX_PIXELS {
                    return Err(Error::model(format!(
                        "{most} tokens of {unit} x {unit} pixels are over {MAX_PIXELS} pixels for an image: choose a lower --image-max-tokens"
                    )));
                }
                let pixels = least * unit * unit..=most_pixels;
                ImageSize::Dynamic { unit, pixels }
            }
        };
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
        let largest = match &image_size {
            ImageSize::Fixed(side) => side * side,
            ImageSize::Dynamic { pixels, .. } => *pixels.end(),
        };
        let patches = largest / (patch_size * patch_size);
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
        let flags = metadata.get::<&[bool]>("clip.vision.is_deepstack_layers")?;
        let layers = flags.unwrap_or_default().iter().enumerate();
        let layers = layers.filter(|(_, is_deep)| **is_deep);
        let deepstack: Vec<usize> = layers.map(|(layer, _)| layer).collect();
        if deepstack.iter().any(|&layer| layer >= n_layer) {
            return Err(Error::model(format!(
                "clip.vision.is_deepstack_layers has more layers than the {n_layer} of clip.vision.block_count"
            )));
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
            deepstack,
            eps: keys.epsilon()?,
            norm: match projector {
                Projector::Qwen25Vl => Norm::Rms,
                _ => Norm::Layer,
            },
            activation: keys.activation()?,
            table_side: (side / patch_size).max(1),
            windows,
            mean: keys.channels("image_mean")?,
            std: keys.channels("image_std")?,
        })
    }

    /// Returns the size to which an image of `width` x `height` pixels is resized.
    pub fn resized(&self, width: usize, height: usize) -> [usize; 2] {
        match &self.image_size {
            ImageSize::Fixed(side) => [*side; 2],
            ImageSize::Dynamic { unit, pixels } => dynamic_size([width, height], *unit, pixels),
        }
    }

    /// Returns the numbers of columns and rows of tokens that an image of `width` x `height` pixels
    /// becomes.
    pub fn grid(&self, width: usize, height: usize) -> [usize; 2] {
        let unit = self.patch_size * self.merge;
        self.resized(width, height).map(|extent| extent / unit)
    }

    /// Returns the largest grid that [`grid`](Self::grid) returns.
    pub fn largest_grid(&self) -> [usize; 2] {
        match &self.image_size {
            ImageSize::Fixed(side) => self.grid(*side, *side),
            ImageSize::Dynamic { unit, pixels } => [pixels.end() / (unit * unit), 1],
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
        if self.projector.is_bidirectional() {
            columns * rows
        } else {
            0
        }
    }

    /// Returns the number of elements of a row, with those of DeepStack.
    pub fn row_width(&self) -> usize {
        self.projection_dim * (1 + self.deepstack.len())
    }
}

/// Returns the size nearest to `size`, in multiples of `unit`, with a number of pixels in `pixels`:
/// `smart_resize` of Hugging Face's processors.
fn dynamic_size(size: [usize; 2], unit: usize, pixels: &RangeInclusive<usize>) -> [usize; 2] {
    let real = size.map(|extent| extent as f64);
    let area = real[0] * real[1];
    let unit_size = unit as f64;
    let multiple = |count: f64| (count as usize).max(1) * unit;
    let near = real.map(|extent| multiple((extent / unit_size).round_ties_even()));
    let near_area = near[0].saturating_mul(near[1]);
    let [least, most] = [*pixels.start(), *pixels.end()];
    let sized = if near_area > most {
        let shrink = (area / most as f64).sqrt();
        real.map(|extent| multiple((extent / shrink / unit_size).floor()))
    } else if near_area < least {
        let grow = (least as f64 / area).sqrt();
        real.map(|extent| multiple((extent * grow / unit_size).ceil()))
    } else {
        near
    };
    // A side of one unit does not shrink further, so the other one must.
    let limit = |extent: usize, other: usize| {
        let extent = extent.min((most / other / unit).max(1) * unit);
        extent.min(MAX_EXTENT / unit * unit)
    };
    [limit(sized[0], sized[1]), limit(sized[1], sized[0])]
}

/// Keys of the image encoder.
struct Keys<'a>(&'a Metadata);

impl Keys<'_> {
    fn optional_count(&self, name: &str) -> Result<Option<usize>> {
        let key = format!("clip.vision.{name}");
        match self.0.get::<u32>(&key)? {
            Some(count) if !(1..=MAX_VALUE).contains(&count) => Err(Error::model(format!(
                "{key} is {count}, must be from 1 to {MAX_VALUE}"
            ))),
            count => Ok(count.map(|count| count as usize)),
        }
    }

    fn count(&self, name: &str) -> Result<usize> {
        // The error of a missing key is that of the metadata.
        let key = format!("clip.vision.{name}");
        self.0.require::<u32>(&key)?;
        Ok(self.optional_count(name)?.unwrap_or(1))
    }

    fn channels(&self, name: &str) -> Result<[f32; 3]> {
        let key = format!("clip.vision.{name}");
        let values = self.0.require::<&[f32]>(&key)?;
        let values = <[f32; 3]>::try_from(values);
        let values = values.ok().filter(|values| {
            let is_scale = name == "image_std";
            let is_valid = |value: &f32| value.is_normal() || *value == 0.0 && !is_scale;
            values.iter().all(is_valid)
        });
        values.ok_or_else(|| {
            Error::model(format!(
                "{key} must have a finite number for each of three channels, and a deviation must not be 0"
            ))
        })
    }

    fn epsilon(&self) -> Result<f32> {
        const KEY: &str = "clip.vision.attention.layer_norm_epsilon";
        let eps = self.0.require::<f32>(KEY)?;
        if eps > 0.0 && eps < 1.0 {
            Ok(eps)
        } else {
            Err(Error::model(format!(
                "{KEY} is {eps}, must be between 0 and 1"
            )))
        }
    }

    fn activation(&self) -> Result<Unary> {
        let has = |key: &str| self.0.get_or(key, false);
        match (has("clip.use_gelu")?, has("clip.use_silu")?) {
            (true, true) => Err(Error::model("clip.use_gelu and clip.use_silu are both set")),
            (true, false) => Ok(Unary::Gelu),
            (false, true) => Ok(Unary::Silu),
            (false, false) => Ok(Unary::GeluQuick),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_processor() {
        // Of transformers' Qwen2VLImageProcessor with these bounds.
        let pixels = 56 * 56..=28 * 28 * 1280;
        for (size, expected) in [
            ([640, 480], [644, 476]),
            ([28, 28], [56, 56]),
            ([1, 1], [56, 56]),
            ([4000, 3000], [1148, 840]),
            ([42, 70], [56, 56]),
            ([98, 126], [112, 112]),
        ] {
            assert_eq!(dynamic_size(size, 28, &pixels), expected, "{size:?}");
        }
    }

    #[test]
    fn no_size_exceeds_the_maximum() {
        let pixels = 28 * 28 * 8..=28 * 28 * 100;
        for size in [
            [20_000, 1],
            [1, 20_000],
            [1, 1],
            [3000, 2],
            [65_535, 65_535],
        ] {
            let [width, height] = dynamic_size(size, 28, &pixels);
            assert!(width >= 28 && height >= 28 && width % 28 == 0 && height % 28 == 0);
            assert!(
                width * height <= *pixels.end(),
                "{size:?}: {width} x {height}"
            );
        }
    }

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
                "mlp".into(),
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
        let fixed = [
            ("clip.projector_type", "gemma3".into()),
            ("clip.vision.image_size", 57u32.into()),
        ];
        let error = VisionSpec::from_metadata(&metadata(&fixed), [None, None]);
        assert!(error.unwrap_err().to_string().contains("image_size"));
    }
}
