//! Images in requests: from base64 to tokens of a prompt.

use crate::context::RequestContext;
use crate::error::{ApiError, Result};
use crate::ids;
use samite_chat::Prompt;
use samite_core::CancelToken;
use samite_llm::{ImageTokens, PlacedImage, place_images};
use samite_requests::Refusal;
use samite_vision::{
    DecodeLimits, EncodedImage, ImagePieces, MAX_PROFILE_BYTES, SharedEncoder, VisionSpec,
    image_file, image_file_len,
};
use std::fmt;
use std::sync::Arc;

/// Text that stands for an image in the prompt of a native completion, as in llama-server.
pub const MARKER: &str = "<__media__>";

/// Fetches images from the URLs of requests.
#[derive(Clone)]
pub struct ImageFetcher {
    fetch: Arc<Fetch>,
    max_bytes: usize,
}

/// Returns the file at a URL, or the reason why it cannot be fetched.
type Fetch = dyn Fn(&str) -> Result<Vec<u8>, String> + Send + Sync;

impl ImageFetcher {
    /// Creates a fetcher of files of at most `max_bytes`.
    pub fn new(
        max_bytes: usize,
        fetch: impl Fn(&str) -> Result<Vec<u8>, String> + Send + Sync + 'static,
    ) -> Self {
        ImageFetcher {
            fetch: Arc::new(fetch),
            max_bytes,
        }
    }
}

impl fmt::Debug for ImageFetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageFetcher")
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

/// Tokens of a prompt, with its images.
#[derive(Clone, Debug)]
pub struct PromptTokens {
    pub tokens: Vec<u32>,
    pub images: Vec<PlacedImage>,
    /// Stops the encoding of the images.
    pub encoding: CancelToken,
}

impl From<Vec<u32>> for PromptTokens {
    fn from(tokens: Vec<u32>) -> Self {
        PromptTokens {
            tokens,
            images: Vec::new(),
            encoding: CancelToken::new(),
        }
    }
}

/// Images of a prompt, in the order of their places in its text.
#[derive(Debug)]
pub struct PromptImages {
    images: Vec<ImagePieces>,
    /// Text that stands for an image in the prompt.
    marker: String,
    /// Stops the encoding of the images.
    encoding: CancelToken,
}

impl PromptImages {
    /// Creates images for a prompt in which no text of users can stand for an image.
    pub fn new() -> Self {
        PromptImages {
            images: Vec::new(),
            marker: ids::id("<__media_") + "__>",
            encoding: CancelToken::new(),
        }
    }

    /// Creates images for a prompt in which [`MARKER`] stands for an image.
    pub fn with_public_marker() -> Self {
        PromptImages {
            images: Vec::new(),
            marker: MARKER.to_owned(),
            encoding: CancelToken::new(),
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
        if url.is_empty() {
            let message = "has no image: send it as data:image/png;base64,…";
            return Err(ApiError::field(place, message));
        }
        let wrong = |error: &dyn fmt::Display| ApiError::field(place, error);
        let owner = context.caller.owner;
        let is_remote = url.starts_with("http://") || url.starts_with("https://");
        let (file_memory, file) = match &context.options.image_fetcher {
            None if is_remote => {
                let message = "URLs are not fetched here (--fetch-images): send the image itself, as data:image/png;base64,…";
                return Err(ApiError::field(place, message));
            }
            Some(fetcher) if is_remote => {
                let memory = context.account.hold(place, fetcher.max_bytes)?;
                let _turn = context.fetching.begin_blocking(owner)?;
                let file = (fetcher.fetch)(url);
                (
                    memory,
                    file.map_err(|error| wrong(&format_args!("{url}: {error}")))?,
                )
            }
            _ => {
                let memory = context.account.hold(place, image_file_len(url.len()))?;
                (memory, image_file(url).map_err(|error| wrong(&error))?)
            }
        };
        let _turn = context.decoding.begin_blocking(owner)?;
        if context.cancel.is_cancelled() {
            return Err(ApiError::new(499, "the client has disconnected"));
        }
        let image = self.decoded(context, encoder, place, &file)?;
        drop(file_memory);
        self.images.push(image);
        Ok(())
    }

    fn decoded(
        &self,
        context: &RequestContext,
        encoder: &SharedEncoder,
        place: &str,
        file: &[u8],
    ) -> Result<ImagePieces> {
        let wrong = |error: samite_vision::Error| ApiError::field(place, error);
        let spec = encoder.spec();
        let profile = context.account.hold(place, MAX_PROFILE_BYTES as usize)?;
        let header = EncodedImage::new(file, &DecodeLimits::default()).map_err(wrong)?;
        let [width, height] = header.size();
        self.check_length(context, n_tokens(spec, [width, height]))?;
        let bytes = usize::try_from(header.decoding_bytes()).unwrap_or(usize::MAX);
        let decoding = context.account.hold(place, bytes)?;
        let image = header.decode().map_err(wrong)?;
        // The tiles stay until their rows are computed, and both until the answer is complete.
        let size = [image.width(), image.height()];
        let count = n_tokens(spec, size);
        self.check_length(context, count)?;
        let tiles = spec.tiles(size[0], size[1]).sizes();
        let pixels = tiles.iter().map(|[width, height]| width * height * 3);
        let rows = count.saturating_mul(size_of::<f32>() * spec.row_width());
        let stays = pixels.sum::<usize>().saturating_add(rows);
        context.account.charge(place, stays)?;
        let cutting = spec.tiles(size[0], size[1]).cutting_bytes();
        let cutting = context.account.hold(place, cutting)?;
        let pieces = encoder.pieces(&image, &self.encoding).map_err(wrong)?;
        drop((profile, decoding, cutting));
        Ok(pieces)
    }

    /// Fails if the tokens of the images are more than fit, before another one is decoded.
    fn check_length(&self, context: &RequestContext, count: usize) -> Result<()> {
        let limit = context.handle()?.limits().context;
        let prompt = self.tiles().map(|tile| tile.len()).sum::<usize>() + count;
        if prompt >= limit {
            let context = limit;
            return Err(Refusal::TooLong { prompt, context }.into());
        }
        Ok(())
    }

    fn tiles(&self) -> impl Iterator<Item = &Arc<ImageTokens>> {
        self.images.iter().flat_map(|image| &image.tiles)
    }

    /// Returns the tokens of a prompt that has the marker for each image. `field` is its field.
    pub fn tokens(
        &self,
        context: &RequestContext,
        field: &str,
        prompt: &Prompt,
    ) -> Result<PromptTokens> {
        let length = prompt.pieces.iter().map(|piece| piece.text.len()).sum();
        if context.encoder.is_none() {
            let tokens =
                context.tokens(field, length, || Ok(prompt.tokens(&context.tokenizer)?))?;
            return Ok(tokens.into());
        }
        let mut images = Vec::new();
        let tokens = context.tokens(field, length, || {
            let texts: Vec<_> = self.images.iter().map(|image| &image.texts[..]).collect();
            let parts = prompt.tokens_around_images(&context.tokenizer, &self.marker, &texts)?;
            let tiles: Vec<_> = self.tiles().cloned().collect();
            let placed = place_images(parts, &tiles);
            let (tokens, placed) = placed.map_err(|error| ApiError::field(field, error))?;
            images = placed;
            Ok(tokens)
        })?;
        Ok(PromptTokens {
            tokens,
            images,
            encoding: self.encoding.clone(),
        })
    }
}

/// Returns the number of tokens of an image of this size.
fn n_tokens(spec: &VisionSpec, [width, height]: [usize; 2]) -> usize {
    let tiles = spec.tiles(width, height).sizes().into_iter();
    tiles
        .map(|size| spec.grid(size).iter().product::<usize>())
        .sum()
}
