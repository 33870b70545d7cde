//! Image encoders of mmproj files, for vision language models.
//!
//! [`EncodedImage`] decodes a file within limits. [`Encoder`] resizes the image as the model's
//! processor does ([`RgbImage::resized`] equals Pillow bit by bit), computes a vision transformer
//! and its projector on a device, and returns rows that take the place of tokens in a language
//! model. [`SharedEncoder`] makes these rows the tokens of a text. [`VisionSpec`] describes an
//! encoder; language models do not depend on it.
//!
//! ```no_run
//! use samite_vision::{DecodeLimits, EncodedImage, Encoder, EncoderOptions};
//! # use std::{error::Error, sync::Arc};
//! # fn encode(devices: Vec<Arc<dyn samite_core::Device>>) -> Result<(), Box<dyn Error>> {
//!
//! let mut encoder = Encoder::load("mmproj.gguf", &EncoderOptions::new(devices))?;
//! let file = std::fs::read("photo.jpeg")?;
//! let image = EncodedImage::new(&file, &DecodeLimits::default())?.decode()?;
//! let rows = encoder.encode(&image, &samite_core::CancelToken::new())?;
//! println!("{} x {} tokens", rows.grid[0], rows.grid[1]);
//! # Ok(())
//! # }
//! ```

mod decode;
mod encoder;
mod error;
mod graph;
mod patches;
mod plan;
mod resample;
mod rgb;
mod shared;
mod spec;
mod url;
mod weights;

pub use decode::{DEFAULT_MAX_PIXELS, DecodeLimits, EncodedImage};
pub use encoder::{Encoder, EncoderOptions, ImageEmbeddings};
pub use error::{Error, Result};
pub use plan::EncoderPlan;
pub use resample::Filter;
pub use rgb::RgbImage;
pub use shared::SharedEncoder;
pub use spec::{ARCHITECTURE, ImageSize, Projector, VisionSpec};
pub use url::{image_file, image_file_len, image_url};
