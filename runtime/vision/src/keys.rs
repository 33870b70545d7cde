//! Keys of an image encoder's metadata.

use crate::error::{Error, Result};
use crate::projector::Projector;
use crate::resample::MAX_EXTENT;
use crate::sizes::ImageSize;
use crate::tiles::Tiling;
use samite_core::Unary;
use samite_gguf::Metadata;
use std::ops::RangeInclusive;

/// Maximum value of a hyperparameter. Products of four fit into `usize`.
pub(crate) const MAX_VALUE: u32 = 1 << 16;

/// Default bounds of the number of rows that an image becomes, for dynamic sizes.
const DEFAULT_TOKENS: RangeInclusive<usize> = 8..=4096;

/// Maximum number of pixels to which an image is resized.
const MAX_PIXELS: usize = 64 << 20;

/// Maximum width and height of images with a fixed size.
const MAX_SIDE: usize = 8192;

/// Default bounds of the number of rows that an image without tiles becomes with LFM2-VL.
const LFM2_TOKENS: RangeInclusive<usize> = 64..=256;

/// Default of the maximum number of rows of Gemma 4.
const GEMMA4_TOKENS: usize = 280;

/// Width and height of a tile of LFM2-VL, for which files have no key.
const LFM2_TILE: usize = 512;

/// Maximum number of columns or rows of tiles.
const MAX_TILES: usize = 64;

/// Keys of the image encoder.
pub(crate) struct Keys<'a>(pub &'a Metadata);

impl Keys<'_> {
    pub fn optional_count(&self, name: &str) -> Result<Option<usize>> {
        let key = format!("clip.vision.{name}");
        match self.0.get::<u32>(&key)? {
            Some(count) if !(1..=MAX_VALUE).contains(&count) => Err(Error::model(format!(
                "{key} is {count}, must be from 1 to {MAX_VALUE}"
            ))),
            count => Ok(count.map(|count| count as usize)),
        }
    }

    pub fn count(&self, name: &str) -> Result<usize> {
        // The error of a missing key is that of the metadata.
        let key = format!("clip.vision.{name}");
        self.0.require::<u32>(&key)?;
        Ok(self.optional_count(name)?.unwrap_or(1))
    }

    pub fn channels(&self, name: &str) -> Result<[f32; 3]> {
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

    pub fn epsilon(&self) -> Result<f32> {
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

    /// Returns the activation of the layers. Files have one name for both kinds of GELU.
    pub fn activation(&self, projector: Projector) -> Result<Unary> {
        if projector == Projector::Gemma4V {
            // Files do not tell.
            return Ok(Unary::Gelu);
        }
        let has = |key: &str| self.0.get_or(key, false);
        match (has("clip.use_gelu")?, has("clip.use_silu")?) {
            (true, true) => Err(Error::model("clip.use_gelu and clip.use_silu are both set")),
            (true, false)
                if matches!(
                    projector,
                    Projector::InternVl | Projector::Pixtral | Projector::Mlp
                ) =>
            {
                Ok(Unary::GeluErf)
            }
            (true, false) => Ok(Unary::Gelu),
            (false, true) => Ok(Unary::Silu),
            (false, false) => Ok(Unary::GeluQuick),
        }
    }

    /// Returns the number of layers whose results go to the projector, of `n_layer`.
    pub fn feature_layers(&self, projector: Projector, n_layer: usize) -> Result<usize> {
        const PINPOINTS: &str = "clip.vision.image_grid_pinpoints";
        const LAYERS: &str = "clip.vision.feature_layer";
        if projector != Projector::Mlp {
            return Ok(n_layer);
        }
        if self.0.contains(PINPOINTS) {
            return Err(Error::model(format!(
                "{PINPOINTS}: projector \"mlp\" with tiles, as in LLaVA 1.6, is not supported"
            )));
        }
        match self.0.get::<&[i32]>(LAYERS)? {
            None => Ok(n_layer),
            Some(&[layer]) if (1..=n_layer as i64).contains(&i64::from(layer)) => {
                Ok(layer as usize)
            }
            Some(layers) => Err(Error::model(format!(
                "{LAYERS} is {layers:?}, and one from 1 to {n_layer} is supported"
            ))),
        }
    }

    /// Returns the width and height of the patches that become one row.
    pub fn merge(&self, projector: Projector) -> Result<usize> {
        let (name, default) = match projector {
            Projector::Gemma3 => ("projector.scale_factor", 4),
            Projector::Idefics3 | Projector::InternVl | Projector::Lfm2 => {
                ("projector.scale_factor", 2)
            }
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl => {
                ("spatial_merge_size", 2)
            }
            Projector::Pixtral => ("spatial_merge_size", 1),
            Projector::Gemma4V => ("projector.scale_factor", 3),
            Projector::Mlp => return Ok(1),
        };
        Ok(self.optional_count(name)?.unwrap_or(default))
    }

    /// Returns the size to which images are resized. `tokens` are bounds of the number of rows.
    pub fn image_size(
        &self,
        projector: Projector,
        tokens: [Option<usize>; 2],
        [side, merge, patch_size]: [usize; 3],
    ) -> Result<ImageSize> {
        let unit = patch_size * merge;
        match projector {
            Projector::Gemma3 | Projector::Idefics3 | Projector::InternVl | Projector::Mlp => {
                if side.is_multiple_of(unit) && side <= MAX_SIDE {
                    return Ok(ImageSize::Fixed(side));
                }
                Err(Error::model(format!(
                    "clip.vision.image_size is {side}, must be a multiple of {merge} patches of {patch_size}, at most {MAX_SIDE}"
                )))
            }
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl => {
                dynamic(tokens, unit, &DEFAULT_TOKENS)
            }
            Projector::Lfm2 => dynamic(tokens, unit, &LFM2_TOKENS),
            Projector::Pixtral => longest_side(tokens, unit, side),
            Projector::Gemma4V => filled(tokens, unit),
        }
    }

    /// Returns the method of dividing images into tiles, whose size is `image_size` unless they
    /// have one of their own.
    pub fn tiling(
        &self,
        projector: Projector,
        image_size: &ImageSize,
        patch_size: usize,
    ) -> Result<Option<Tiling>> {
        match (projector, image_size) {
            (Projector::Idefics3, &ImageSize::Fixed(side)) => {
                // Old files do not tell: one tile.
                let longest = self.optional_count("preproc_image_size")?.unwrap_or(side);
                if longest > MAX_SIDE || longest.div_ceil(side) > MAX_TILES {
                    return Err(Error::model(format!(
                        "clip.vision.preproc_image_size is {longest}, at most {MAX_SIDE} and {MAX_TILES} tiles of clip.vision.image_size {side} are supported"
                    )));
                }
                Ok(Some(Tiling::LongestSide { longest }))
            }
            (Projector::InternVl, &ImageSize::Fixed(side)) => {
                let least = self.optional_count("preproc_min_tiles")?.unwrap_or(1);
                let most = self.optional_count("preproc_max_tiles")?.unwrap_or(12);
                if least > most || most > MAX_TILES || most * side * side > MAX_PIXELS {
                    return Err(Error::model(format!(
                        "clip.vision.preproc_min_tiles is {least} and clip.vision.preproc_max_tiles is {most}: they must be in order, and at most {MAX_TILES} tiles of {side} x {side} and {MAX_PIXELS} pixels in all are supported"
                    )));
                }
                Ok(Some(Tiling::AspectRatio {
                    tiles: least..=most,
                }))
            }
            (Projector::Lfm2, ImageSize::Dynamic { unit, pixels }) => {
                if !LFM2_TILE.is_multiple_of(*unit) {
                    return Err(Error::model(format!(
                        "clip.vision.patch_size is {patch_size}: tiles of {LFM2_TILE} pixels must be multiples of the {unit} pixels of a row"
                    )));
                }
                Ok(Some(Tiling::LargeOnly {
                    tiles: 2..=10,
                    side: LFM2_TILE,
                    pixels: 2 * pixels.end(),
                    unit: *unit,
                    least: patch_size,
                }))
            }
            _ => Ok(None),
        }
    }
}

/// Checks the bounds of the number of tokens of an image.
fn check_tokens(least: usize, most: usize) -> Result<()> {
    if least > most || least == 0 || most > MAX_VALUE as usize {
        return Err(Error::model(format!(
            "an image cannot become from {least} to {most} tokens (--image-min-tokens, --image-max-tokens): from 1 to {MAX_VALUE}, in order"
        )));
    }
    Ok(())
}

/// Returns sizes in multiples of `unit`, with bounds of the number of rows.
fn dynamic(
    [least, most]: [Option<usize>; 2],
    unit: usize,
    default: &RangeInclusive<usize>,
) -> Result<ImageSize> {
    let most = most.unwrap_or(*default.end());
    let least = least.unwrap_or(most.min(*default.start()));
    check_tokens(least, most)?;
    let most_pixels = most.saturating_mul(unit).saturating_mul(unit);
    if most_pixels > MAX_PIXELS {
        return Err(Error::model(format!(
            "{most} tokens of {unit} x {unit} pixels are over {MAX_PIXELS} pixels for an image: choose a lower --image-max-tokens"
        )));
    }
    let pixels = least * unit * unit..=most_pixels;
    Ok(ImageSize::Dynamic { unit, pixels })
}

/// Returns sizes in multiples of `unit` with sides of at most `longest` pixels, and at most as many
/// tokens as the second bound. No image is enlarged for the first one.
fn longest_side(
    [least, most]: [Option<usize>; 2],
    unit: usize,
    longest: usize,
) -> Result<ImageSize> {
    check_tokens(least.unwrap_or(1), most.unwrap_or(MAX_VALUE as usize))?;
    if longest.saturating_add(unit) > MAX_SIDE {
        return Err(Error::model(format!(
            "clip.vision.image_size is {longest}: with the {unit} pixels of a row, at most {MAX_SIDE} are supported"
        )));
    }
    // A square of n x n rows of the encoder has n - 1 more between its lines.
    let limit = most.map(|most| (most as f64 + 1.25).sqrt() - 0.5);
    let limit = limit.map_or(longest, |side| (side as usize).max(1) * unit);
    Ok(ImageSize::LongestSide {
        unit,
        longest: longest.min(limit),
    })
}

/// Returns sizes in multiples of `unit` with as many tokens as the second bound allows.
fn filled([least, most]: [Option<usize>; 2], unit: usize) -> Result<ImageSize> {
    let count = most.unwrap_or(GEMMA4_TOKENS);
    // The bounds of the number of pixels are those of sizes that do not fill them.
    dynamic([least, Some(count)], unit, &DEFAULT_TOKENS)?;
    Ok(ImageSize::Filled {
        unit,
        count,
        longest: MAX_EXTENT / unit * unit,
    })
}
