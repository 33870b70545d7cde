//! An encoder that several images share, and their tokens for a language model.

use crate::encoder::Encoder;
use crate::error::{Error, Result};
use crate::rgb::RgbImage;
use crate::spec::VisionSpec;
use samite_core::CancelToken;
use samite_llm::{ImageTokens, Model};
use std::sync::{Arc, Mutex, PoisonError};

/// An image in a prompt: its tiles, with texts before, between and after them.
#[derive(Debug)]
pub struct ImagePieces {
    /// Texts around the tiles, one more than tiles. They can be empty, and have special tokens.
    pub texts: Vec<String>,
    /// Tiles. An image that the encoder does not divide is one tile.
    pub tiles: Vec<Arc<ImageTokens>>,
}

/// An encoder that encodes images when a language model needs their rows.
#[derive(Clone, Debug)]
pub struct SharedEncoder {
    encoder: Arc<Mutex<Encoder>>,
    spec: Arc<VisionSpec>,
    fingerprint: [u8; 32],
}

impl SharedEncoder {
    /// Shares an encoder.
    pub fn new(encoder: Encoder) -> Self {
        SharedEncoder {
            spec: Arc::new(encoder.spec().clone()),
            fingerprint: encoder.fingerprint(),
            encoder: Arc::new(Mutex::new(encoder)),
        }
    }

    /// Returns the description of the encoder.
    pub fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    /// Checks that `model` can read the encoder's rows.
    ///
    /// # Errors
    /// Returns the errors of [`VisionSpec::check`].
    pub fn check(&self, model: &Model) -> Result<()> {
        let encoder = self.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        self.spec.check(encoder.name(), model)
    }

    /// Returns the tokens of an image. A tile is encoded when its rows are first needed, which
    /// `cancel` can stop.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if the image is too large.
    pub fn pieces(&self, image: &RgbImage, cancel: &CancelToken) -> Result<ImagePieces> {
        let plan = self.spec.tiles(image.width(), image.height());
        let tiles = plan.cut(image)?;
        // Rows depend on the encoder, on the sizes to which it resizes the image, and on the tile's
        // place.
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.fingerprint);
        hasher.update(&image.hash());
        let sizes = [plan.grid()].into_iter().chain(plan.sizes());
        for extent in sizes.flatten() {
            hasher.update(&(extent as u64).to_le_bytes());
        }
        let tiles = tiles.into_iter().enumerate().map(|(place, tile)| {
            let mut hasher = hasher.clone();
            hasher.update(&(place as u64).to_le_bytes());
            Arc::new(self.tokens(tile, hasher.finalize().into(), cancel))
        });
        Ok(ImagePieces {
            texts: self.spec.projector.texts(plan.grid()),
            tiles: tiles.collect(),
        })
    }

    /// Returns the tokens of a tile with this hash.
    fn tokens(&self, tile: RgbImage, hash: [u8; 32], cancel: &CancelToken) -> ImageTokens {
        let size = [tile.width(), tile.height()];
        let grid = if self.spec.projector.has_grid_positions() {
            self.spec.grid(size)
        } else {
            [self.spec.token_count(size), 1]
        };
        let (encoder, cancel) = (Arc::clone(&self.encoder), cancel.clone());
        let encode = move || {
            let mut encoder = encoder.lock().unwrap_or_else(PoisonError::into_inner);
            let rows = encoder.encode_tile(&tile, &cancel);
            rows.map(|rows| rows.values).map_err(for_model)
        };
        let mut tokens = ImageTokens::new(hash, grid, encode);
        if !self.spec.projector.has_grid_positions() {
            tokens = tokens.on_one_axis();
        }
        if self.spec.is_bidirectional() {
            tokens = tokens.bidirectional();
        }
        tokens
    }
}

/// Returns an encoder's error as one of a language model.
fn for_model(error: Error) -> samite_llm::Error {
    match error {
        Error::Core(error) => samite_llm::Error::Core(error),
        error => samite_llm::Error::InvalidArgument(error.to_string().into()),
    }
}
