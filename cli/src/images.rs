//! Images in a prompt: flags, and their tokens.

use crate::cpu_args::CpuArgs;
use crate::failure::{CommandError, CommandResult};
use crate::setup::ModelSetup;
use clap::Args;
use samite::chat::Prompt;
use samite::llm::{ContextOptions, ImageTokens, Model, PlacedImage, image_marker, place_images};
use samite::vision::{
    DecodeLimits, EncodedImage, Encoder, EncoderOptions, EncoderPlan, Error as EncoderError,
    ImagePieces, RgbImage, SharedEncoder, VisionSpec, image_url,
};
use samite::{CancelToken, Device};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Text that stands for an image in what users write, as in llama.cpp.
const MARKER: &str = "<__media__>";

/// Maximum bytes of an image file.
const MAX_BYTES: u64 = 256 << 20;

/// Flags of an image encoder.
#[derive(Debug, Args)]
#[command(next_help_heading = "Images")]
pub struct EncoderArgs {
    /// Image encoder of the model: a GGUF file [also: -mm]
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,

    /// Compute images on the CPU
    #[arg(long)]
    no_mmproj_offload: bool,

    /// Minimum number of tokens of an image, for encoders with images of any size
    #[arg(long, value_name = "N", value_parser = crate::args::token_count)]
    image_min_tokens: Option<usize>,

    /// Maximum number of tokens of an image, for encoders with images of any size
    #[arg(long, value_name = "N", value_parser = crate::args::token_count)]
    image_max_tokens: Option<usize>,
}

/// Flags of images.
#[derive(Debug, Args)]
#[command(next_help_heading = "Images")]
pub struct ImageArgs {
    #[command(flatten)]
    encoder: EncoderArgs,

    /// Image for the model: a PNG, JPEG, WebP or GIF file; may be repeated. <__media__> in the text
    /// marks where each image goes; without it, images precede the text
    #[arg(long, value_name = "FILE", requires = "mmproj")]
    image: Vec<PathBuf>,
}

/// Images for a prompt.
pub struct PromptImages {
    encoder: SharedEncoder,
    images: Vec<ImagePieces>,
}

impl EncoderArgs {
    /// Returns the file of the encoder.
    #[cfg(feature = "serve")]
    pub fn path(&self) -> Option<&Path> {
        self.mmproj.as_deref()
    }

    fn options(&self, devices: impl ExactSizeIterator<Item = Arc<dyn Device>>) -> EncoderOptions {
        let host = devices.len().saturating_sub(1);
        let first = if self.no_mmproj_offload { host } else { 0 };
        EncoderOptions {
            tokens: [self.image_min_tokens, self.image_max_tokens],
            ..EncoderOptions::new(devices.skip(first).collect())
        }
    }

    /// Plans the encoder on the devices of a model, if there is one.
    pub fn plan(
        &self,
        setup: &ModelSetup,
        cpu: &CpuArgs,
    ) -> CommandResult<Result<Option<EncoderPlan>, EncoderError>> {
        let Some(path) = &self.mmproj else {
            return Ok(Ok(None));
        };
        let devices = setup.devices.for_model(&setup.placement, cpu)?;
        let options = self.options(devices.into_iter());
        Ok(EncoderPlan::new(path, &options).map(Some))
    }

    /// Returns the setup of a model beside the encoder: it leaves memory for it.
    pub fn beside(&self, setup: &ModelSetup, cpu: &CpuArgs) -> CommandResult<ModelSetup> {
        let plan = self.plan(setup, cpu)?.map_err(CommandError::error)?;
        Ok(setup.leaving(plan.map_or(0, |plan| plan.bytes())))
    }

    /// Loads the encoder to the devices of the model.
    pub fn load(
        &self,
        model: &Model,
        threads: Option<usize>,
    ) -> Result<Option<SharedEncoder>, EncoderError> {
        let Some(path) = &self.mmproj else {
            return Ok(None);
        };
        let options = self.options(model.devices().iter().cloned());
        let mut encoder = Encoder::load(path, &options)?;
        encoder.set_threads(threads);
        let encoder = SharedEncoder::new(encoder);
        encoder.check(model)?;
        Ok(Some(encoder))
    }
}

/// Makes room for images in a context. Encoders can require that all of an image is computed at
/// once.
pub fn fit(spec: &VisionSpec, options: &mut ContextOptions) {
    let at_once = spec.tokens_at_once();
    options.n_batch = options.n_batch.max(at_once);
    options.n_ubatch = options.n_ubatch.max(at_once);
    options.images = true;
}

impl ImageArgs {
    /// Returns whether there are images.
    pub fn are_given(&self) -> bool {
        !self.image.is_empty()
    }

    /// Returns the setup of a model beside the encoder of the images.
    pub fn beside(&self, setup: &ModelSetup, cpu: &CpuArgs) -> CommandResult<ModelSetup> {
        if !self.are_given() {
            return Ok(setup.clone());
        }
        self.encoder.beside(setup, cpu)
    }

    /// Decodes the images, and loads their encoder to the devices of the model.
    pub fn load(
        &self,
        model: &Model,
        threads: Option<usize>,
        cancel: &CancelToken,
    ) -> CommandResult<Option<PromptImages>> {
        if !self.are_given() {
            return Ok(None);
        }
        let images = self.image.iter().map(|path| decoded(path));
        let images: Vec<RgbImage> = images.collect::<CommandResult<_>>()?;
        let encoder = self.encoder.load(model, threads);
        let Some(encoder) = encoder.map_err(CommandError::error)? else {
            return Ok(None);
        };
        let pieces = images.iter().map(|image| encoder.pieces(image, cancel));
        let images = pieces.collect::<Result<_, _>>();
        let images = images.map_err(CommandError::error)?;
        Ok(Some(PromptImages { images, encoder }))
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> CommandError {
    CommandError::error(format_args!("{}: {error}", path.display()))
}

fn decoded(path: &Path) -> CommandResult<RgbImage> {
    let file = read(path)?;
    let image = EncodedImage::new(&file, &DecodeLimits::default());
    let image = image.and_then(EncodedImage::decode);
    image.map_err(|error| failed(path, error))
}

/// Returns the file of an image as a URL for a message, if it can be decoded.
pub fn url(path: &Path) -> CommandResult<String> {
    decoded(path)?;
    Ok(image_url(&read(path)?))
}

fn read(path: &Path) -> CommandResult<Vec<u8>> {
    let failed = |error: &dyn std::fmt::Display| failed(path, error);
    let about = std::fs::metadata(path).map_err(|error| failed(&error))?;
    if !about.is_file() {
        return Err(failed(&"not a file"));
    }
    let mut file = Vec::new();
    std::fs::File::open(path)
        .and_then(|open| open.take(MAX_BYTES + 1).read_to_end(&mut file))
        .map_err(|error| failed(&error))?;
    if file.len() as u64 > MAX_BYTES {
        return Err(failed(&format_args!(
            "an image file has at most {MAX_BYTES} bytes"
        )));
    }
    Ok(file)
}

impl PromptImages {
    /// Makes room for the images.
    pub fn fit(&self, options: &mut ContextOptions) {
        fit(self.encoder.spec(), options);
    }

    fn tiles(&self) -> Vec<Arc<ImageTokens>> {
        let tiles = self.images.iter().flat_map(|image| &image.tiles);
        tiles.cloned().collect()
    }

    fn marker(&self) -> String {
        image_marker(&self.tiles())
    }

    /// Returns a text with a marker for each image.
    pub fn text(&self, text: &str) -> CommandResult<String> {
        match (text.matches(MARKER).count(), self.images.len()) {
            (0, images) => Ok(self.marker().repeat(images) + text),
            (places, images) if places == images => Ok(text.replace(MARKER, &self.marker())),
            (places, images) => Err(CommandError::usage(format_args!(
                "the text has {places} places for images ({MARKER}), and {images} are given"
            ))),
        }
    }

    /// Returns the tokens of a prompt whose text has a place for each image.
    pub fn tokens(
        &self,
        model: &Model,
        prompt: &Prompt,
    ) -> CommandResult<(Vec<u32>, Vec<PlacedImage>)> {
        let texts: Vec<_> = self.images.iter().map(|image| &image.texts[..]).collect();
        let parts = prompt.tokens_around_images(model.tokenizer()?, &self.marker(), &texts);
        let parts = parts.map_err(CommandError::error)?;
        place_images(parts, &self.tiles()).map_err(|_| {
            CommandError::error(
                "the chat template does not show all images once: choose another one with --chat-template",
            )
        })
    }
}
