//! Images in the messages of a conversation.

use super::{ConversationError, Result};
use crate::CancelToken;
use crate::chat::{Content, ContentPart, Message, Prompt};
use crate::llm::{ImageTokens, PlacedImage, image_marker, place_images};
use crate::text::Tokenizer;
use crate::vision::{DecodeLimits, EncodedImage, ImagePieces, SharedEncoder, image_file};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The image encoder of a conversation, and the images of its messages.
#[derive(Debug)]
pub(super) struct ConversationImages {
    encoder: SharedEncoder,
    /// Images by the hash of their URL. Their rows are computed once.
    known: BTreeMap<[u8; 32], Arc<ImagePieces>>,
}

/// Images of messages in order, and the text that stands for each of them.
#[derive(Debug)]
pub(super) struct MarkedImages {
    images: Vec<Arc<ImagePieces>>,
    marker: String,
}

/// Returns the URL of an image.
fn url_of(part: &ContentPart) -> Option<&str> {
    match part {
        ContentPart::ImageUrl { image_url } => image_url.get("url").unwrap_or(image_url).as_str(),
        _ => None,
    }
}

impl ConversationImages {
    pub fn new(encoder: SharedEncoder) -> Self {
        ConversationImages {
            encoder,
            known: BTreeMap::new(),
        }
    }

    /// Decodes the images of messages, and returns the messages with a text in place of each image.
    pub fn marked(
        &mut self,
        messages: &[Message],
        cancel: &CancelToken,
    ) -> Result<(Vec<Message>, MarkedImages)> {
        let mut known = BTreeMap::new();
        let mut images = Vec::new();
        let contents = messages.iter().map(|message| &message.content);
        for url in contents.filter_map(parts_of).flatten().filter_map(url_of) {
            let hash: [u8; 32] = blake3::hash(url.as_bytes()).into();
            let image = match known.get(&hash).or_else(|| self.known.get(&hash)) {
                Some(image) => Arc::clone(image),
                None => {
                    let file = image_file(url)?;
                    let image = EncodedImage::new(&file, &DecodeLimits::default())?.decode()?;
                    Arc::new(self.encoder.pieces(&image, cancel)?)
                }
            };
            known.insert(hash, Arc::clone(&image));
            images.push(image);
        }
        self.known = known;
        let marker = image_marker(&tiles_of(&images));
        let mut messages = messages.to_vec();
        for message in &mut messages {
            if let Content::Parts(parts) = &mut message.content {
                for part in parts.iter_mut().filter(|part| url_of(part).is_some()) {
                    *part = ContentPart::text(&marker);
                }
            }
        }
        Ok((messages, MarkedImages { images, marker }))
    }
}

impl MarkedImages {
    /// Returns the tokens of a prompt with these images.
    pub fn tokens(
        &self,
        prompt: &Prompt,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, Vec<PlacedImage>)> {
        let texts: Vec<_> = self.images.iter().map(|image| &image.texts[..]).collect();
        let parts = prompt.tokens_around_images(tokenizer, &self.marker, &texts);
        let parts = parts.map_err(crate::llm::Error::from)?;
        Ok(place_images(parts, &tiles_of(&self.images))?)
    }
}

fn tiles_of(images: &[Arc<ImagePieces>]) -> Vec<Arc<ImageTokens>> {
    let tiles = images.iter().flat_map(|image| &image.tiles);
    tiles.cloned().collect()
}

fn parts_of(content: &Content) -> Option<&Vec<ContentPart>> {
    match content {
        Content::Parts(parts) => Some(parts),
        _ => None,
    }
}

impl super::Conversation {
    /// Sets the image encoder of the model, for images in messages.
    ///
    /// ```no_run
    /// use samite::Conversation;
    /// use samite::chat::{Content, ContentPart};
    /// use samite::vision::{Encoder, EncoderOptions, SharedEncoder, image_url};
    ///
    /// let mut chat = Conversation::open("model.gguf")?;
    /// let devices = chat.context().model().devices().iter().cloned().collect();
    /// let encoder = Encoder::load("mmproj.gguf", &EncoderOptions::new(devices))?;
    /// chat.set_image_encoder(SharedEncoder::new(encoder))?;
    /// let photo = image_url(&std::fs::read("photo.jpeg")?);
    /// let parts = vec![ContentPart::image(photo), ContentPart::text("What is this?")];
    /// println!("{}", chat.ask(Content::Parts(parts))?);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If it is the encoder of another model.
    pub fn set_image_encoder(&mut self, encoder: SharedEncoder) -> Result<()> {
        encoder.check(self.session.context().model())?;
        self.images = Some(ConversationImages::new(encoder));
        Ok(())
    }
}

impl From<crate::vision::Error> for ConversationError {
    fn from(error: crate::vision::Error) -> Self {
        match error {
            crate::vision::Error::Core(error) => Self::Model(error.into()),
            error => Self::Image(error.to_string()),
        }
    }
}
