//! Images in requests: from base64 to tokens of a prompt.

use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::ids;
use samite_chat::Prompt;
use samite_llm::{ImageTokens, PlacedImage, place_images};
use samite_requests::Refusal;
use samite_vision::{DecodeLimits, EncodedImage, SharedEncoder, image_file, image_file_len};
use std::sync::Arc;

/// Text that stands for an image in the prompt of a native completion, as in llama-server.
pub const MARKER: &str = "<__media__>";

/// Tokens of a prompt, with its images.
#[derive(Clone, Debug, Default)]
pub struct PromptTokens {
    pub tokens: Vec<u32>,
    pub images: Vec<PlacedImage>,
}

impl From<Vec<u32>> for PromptTokens {
    fn from(tokens: Vec<u32>) -> Self {
        PromptTokens {
            tokens,
            images: Vec::new(),
        }
    }
}

/// Images of a prompt, in the order of their places in its text.
#[derive(Debug)]
pub struct PromptImages {
    images: Vec<Arc<ImageTokens>>,
    /// Text that stands for an image in the prompt.
    marker: String,
}

impl PromptImages {
    /// Creates images for a prompt in which no text of users can stand for an image.
    pub fn new() -> Self {
        PromptImages {
            images: Vec::new(),
            marker: ids::id("<__media_") + "__>",
        }
    }

    /// Creates images for a prompt in which [`MARKER`] stands for an image.
    pub fn with_public_marker() -> Self {
        PromptImages {
            images: Vec::new(),
            marker: MARKER.to_owned(),
        }
    }

    /// Returns the text that stands for an image.
    pub fn marker(&self) -> &str {
        &self.marker
    }

    /// Adds an image from a `data:` URL, or from base64 as in ollama. `place` is its field.
    pub fn add(&mut self, context: &RequestContext, place: &str, url: &str) -> Result<()> {
        let Some(encoder) = &context.encoder else {
            return Err(ApiError::image(place));
        };
        let file_memory = context.account.hold(place, image_file_len(url.len()))?;
        let file = image_file(url).map_err(|error| ApiError::field(place, error))?;
        let image = self.decoded(context, encoder, place, &file)?;
        drop(file_memory);
        self.images.push(Arc::new(image));
        Ok(())
    }

    fn decoded(
        &self,
        context: &RequestContext,
        encoder: &SharedEncoder,
        place: &str,
        file: &[u8],
    ) -> Result<ImageTokens> {
        let wrong = |error: samite_vision::Error| ApiError::field(place, error);
        let header = EncodedImage::new(file, &DecodeLimits::default()).map_err(wrong)?;
        let [width, height] = header.size();
        self.check_length(context, encoder.spec().grid(width, height))?;
        let bytes = usize::try_from(header.decoding_bytes()).unwrap_or(usize::MAX);
        let decoding = context.account.hold(place, bytes)?;
        let image = header.decode().map_err(wrong)?;
        // The image stays until its rows are computed, and both until the answer is complete.
        let pixels = image.pixels().len();
        let grid = encoder.spec().grid(image.width(), image.height());
        let row = size_of::<f32>() * encoder.spec().row_width();
        let rows = (grid[0] * grid[1]).saturating_mul(row);
        drop(decoding);
        context.account.charge(place, pixels.saturating_add(rows))?;
        self.check_length(context, grid)?;
        Ok(encoder.tokens(image, &context.cancel))
    }

    /// Fails if the tokens of the images are more than fit, before another one is decoded.
    fn check_length(&self, context: &RequestContext, [columns, rows]: [usize; 2]) -> Result<()> {
        let limit = context.handle()?.limits().context;
        let own = self.images.iter().map(|image| image.len()).sum::<usize>();
        let prompt = own + columns * rows;
        if prompt >= limit {
            let context = limit;
            return Err(Refusal::TooLong { prompt, context }.into());
        }
        Ok(())
    }

    /// Returns the tokens of a prompt that has the marker for each image. `field` is its field.
    pub fn tokens(
        &self,
        context: &RequestContext,
        field: &str,
        prompt: &Prompt,
    ) -> Result<PromptTokens> {
        let length = prompt.pieces.iter().map(|piece| piece.text.len()).sum();
        let Some(encoder) = &context.encoder else {
            let tokens =
                context.tokens(field, length, || Ok(prompt.tokens(&context.tokenizer)?))?;
            return Ok(tokens.into());
        };
        let mut images = Vec::new();
        let tokens = context.tokens(field, length, || {
            let around = encoder.spec().projector.delimiters();
            let parts = prompt.tokens_around_images(&context.tokenizer, &self.marker, around)?;
            let placed = place_images(parts, &self.images);
            let (tokens, placed) = placed.map_err(|error| ApiError::field(field, error))?;
            images = placed;
            Ok(tokens)
        })?;
        Ok(PromptTokens { tokens, images })
    }
}
