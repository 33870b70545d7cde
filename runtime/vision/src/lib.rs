//! Image encoders of mmproj files, for vision language models.
//!
//! [`EncodedImage`] decodes a file within limits. [`Encoder`] resizes the image as the model's
//! processor does ([`RgbImage::resized`] equals Pillow bit by bit), computes a vision transformer
//! and its projector on a device, and returns rows that take the place of tokens in a language
//! model. Some encoders divide images into tiles ([`TilePlan`]), which they encode one by one.
//! [`SharedEncoder`] makes these rows the tokens of a text. [`VisionSpec`] describes an encoder;
//! language models do not depend on it.
//!
//! ```no_run
//! use samite_vision::{DecodeLimits, EncodedImage, Encoder, EncoderOptions};
//! # use std::{error::Error, sync::Arc};
//! # fn encode(devices: Vec<Arc<dyn samite_core::Device>>) -> Result<(), Box<dyn Error>> {
//!
//! let mut encoder = Encoder::load("mmproj.gguf", &EncoderOptions::new(devices))?;
//! let file = std::fs::read("photo.jpeg")?;
//! let image = EncodedImage::new(&file, &DecodeLimits::default())?.decode()?;
//! for tile in encoder.encode(&image, &samite_core::CancelToken::new())? {
//!     println!("{} x {} tokens", tile.grid[0], tile.grid[1]);
//! }
//! # Ok(())
//! # }
//! ```

mod decode;
mod encoder;
mod error;
mod graph;
mod keys;
mod patches;
mod plan;
mod projector;
mod resample;
mod rgb;
mod shared;
mod sizes;
mod spec;
mod tiles;
mod url;
mod weights;

pub use decode::{DEFAULT_MAX_PIXELS, DecodeLimits, EncodedImage, MAX_PROFILE_BYTES};
pub use encoder::{Encoder, EncoderOptions, ImageEmbeddings};
pub use error::{Error, Result};
pub use plan::EncoderPlan;
pub use projector::Projector;
pub use resample::Filter;
pub use rgb::RgbImage;
pub use shared::{ImagePieces, SharedEncoder};
pub use sizes::ImageSize;
pub use spec::{ARCHITECTURE, VisionSpec};
pub use tiles::{TilePlan, Tiling};
pub use url::{image_file, image_file_len, image_url};
