//! Images in a text: rows that an encoder computes take the place of tokens.
//!
//! An image's tokens have IDs beyond every vocabulary, which derive from the hash of the image. Two
//! texts with the same images are therefore equal token by token, and share cached prefixes.

use crate::batch::Batch;
use crate::error::{Error, Result};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

/// IDs from here on stand for rows of images. No vocabulary is that large.
pub const FIRST_IMAGE_ID: u32 = 1 << 31;

/// Minimum number of tokens whose IDs identify an image: they have 124 bits of its hash.
const MIN_IDENTIFYING_TOKENS: usize = 4;

/// Function that computes the rows of an image.
type Encode = dyn Fn() -> Result<Vec<f32>> + Send + Sync;

/// An image as the tokens of a language model.
pub struct ImageTokens {
    ids: Vec<u32>,
    /// Columns and rows of tokens, for positions on several axes.
    grid: Option<[usize; 2]>,
    is_bidirectional: bool,
    encode: Box<Encode>,
    rows: OnceLock<Result<Arc<[f32]>>>,
}

impl fmt::Debug for ImageTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageTokens")
            .field("len", &self.len())
            .field("grid", &self.grid)
            .finish_non_exhaustive()
    }
}

impl ImageTokens {
    /// Describes an image with this hash, which becomes a grid of `columns` and `rows` of tokens.
    /// `encode` computes the embeddings of the tokens, from left to right and top to bottom, when
    /// they are first needed.
    pub fn new(
        hash: [u8; 32],
        [columns, rows]: [usize; 2],
        encode: impl Fn() -> Result<Vec<f32>> + Send + Sync + 'static,
    ) -> Self {
        // The first eight tokens have 31 bits each of the hash: almost all of it.
        let word = |at: usize| {
            let bytes: [u8; 4] = std::array::from_fn(|byte| hash[at % 8 * 4 + byte]);
            u32::from_le_bytes(bytes).wrapping_add(at as u32 / 8)
        };
        let count = columns.saturating_mul(rows);
        ImageTokens {
            ids: (0..count).map(|at| FIRST_IMAGE_ID | word(at)).collect(),
            grid: Some([columns, rows]),
            is_bidirectional: false,
            encode: Box::new(encode),
            rows: OnceLock::new(),
        }
    }

    /// Gives the tokens positions on one axis, like those of a text.
    pub fn on_one_axis(self) -> Self {
        ImageTokens { grid: None, ..self }
    }

    /// Lets the tokens attend to each other in both directions.
    pub fn bidirectional(self) -> Self {
        ImageTokens {
            is_bidirectional: true,
            ..self
        }
    }

    /// Returns the IDs that stand for the image in a text.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns whether the tokens attend to each other in both directions.
    pub fn is_bidirectional(&self) -> bool {
        self.is_bidirectional
    }

    /// Returns whether the image has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the number of positions that the image takes on the axis of time.
    fn positions(&self) -> usize {
        match self.grid {
            Some([columns, rows]) => columns.max(rows),
            None => self.len(),
        }
    }

    /// Returns the embeddings of all tokens, and computes them when they are first needed.
    ///
    /// # Errors
    /// Returns the error of the encoder, which stays unless it was a cancellation.
    pub fn rows(&self) -> Result<Arc<[f32]>> {
        if let Some(rows) = self.rows.get() {
            return rows.clone();
        }
        // A panic must not end the thread that encodes all images.
        let encoded = catch_unwind(AssertUnwindSafe(&self.encode));
        let encoded = encoded.unwrap_or_else(|_| Err(Error::invalid("the image encoder panicked")));
        match encoded.map(Arc::from) {
            Err(error) if error.is_cancelled() => Err(error),
            rows => self.rows.get_or_init(|| rows).clone(),
        }
    }

    /// Returns the embeddings, or the error of the encoder, if they were computed.
    pub fn computed_rows(&self) -> Option<Result<Arc<[f32]>>> {
        self.rows.get().cloned()
    }
}

/// An image at a place of a text.
#[derive(Clone, Debug)]
pub struct PlacedImage {
    /// Index of its first token in the text.
    pub start: usize,
    /// The image.
    pub image: Arc<ImageTokens>,
}

impl PlacedImage {
    /// Returns the index after its last token.
    pub fn end(&self) -> usize {
        self.start + self.image.len()
    }
}

/// Returns a text that stands for an image of a prompt. It derives from the images, so that another
/// text of the prompt does not have it by chance.
pub fn image_marker(images: &[Arc<ImageTokens>]) -> String {
    let ids = images.iter().flat_map(|image| image.ids());
    let ids: Vec<String> = ids
        .take(MIN_IDENTIFYING_TOKENS)
        .map(|id| format!("{id:x}"))
        .collect();
    format!("<__media_{}__>", ids.join("_"))
}

/// Joins the parts of a text with the images between them. Returns the tokens, and the images at
/// their places.
///
/// # Errors
/// Returns [`Error::InvalidArgument`] if there is not one image between each two parts.
pub fn place_images(
    parts: Vec<Vec<u32>>,
    images: &[Arc<ImageTokens>],
) -> Result<(Vec<u32>, Vec<PlacedImage>)> {
    if parts.len() != images.len() + 1 {
        return Err(Error::invalid(format!(
            "{} images are given, and the text has places for {}",
            images.len(),
            parts.len().saturating_sub(1)
        )));
    }
    let mut parts = parts.into_iter();
    let mut tokens = parts.next().unwrap_or_default();
    let mut placed = Vec::with_capacity(images.len());
    for (image, after) in images.iter().zip(parts) {
        placed.push(PlacedImage {
            start: tokens.len(),
            image: Arc::clone(image),
        });
        tokens.extend(image.ids());
        tokens.extend(after);
    }
    Ok((tokens, placed))
}

/// The images of a text, in order.
#[derive(Clone, Debug, Default)]
pub struct Images(Vec<PlacedImage>);

impl Images {
    /// Checks images against the tokens of their text.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if images overlap, or if a token is not that of the image
    /// at its place.
    pub fn new(placed: Vec<PlacedImage>, tokens: &[u32]) -> Result<Self> {
        let mut end = 0;
        for (index, one) in placed.iter().enumerate() {
            let own = tokens.get(one.start..).unwrap_or_default();
            if one.start < end || !own.starts_with(one.image.ids()) {
                return Err(Error::invalid(format!(
                    "image {index}: its tokens are not at its place in the text"
                )));
            }
            end = one.end();
        }
        let images = Images(placed);
        let is_placed = |at: usize| images.at(at).is_some();
        let mut places = tokens.iter().enumerate();
        if let Some((at, id)) = places.find(|&(at, &id)| id >= FIRST_IMAGE_ID && !is_placed(at)) {
            return Err(Error::invalid(format!(
                "token {at} of the text has ID {id}, which stands for an image that is not given"
            )));
        }
        Ok(images)
    }

    /// Returns whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the image that covers a place of the text.
    fn at(&self, at: usize) -> Option<&PlacedImage> {
        let index = self.0.partition_point(|one| one.end() <= at);
        self.0.get(index).filter(|one| one.start <= at)
    }

    /// Returns the position of a token for rotations, without the images before it: an image may
    /// take fewer positions than it has tokens.
    fn position(&self, at: usize) -> usize {
        let before = self.0.iter().take_while(|one| one.end() <= at);
        let saved = before.map(|one| one.image.len() - one.image.positions());
        at - saved.sum::<usize>()
    }

    /// Returns `most`, or less if a batch that starts at `first` and ends there would cut an image
    /// whose tokens attend to each other.
    pub fn end_of_batch(&self, first: usize, most: usize) -> usize {
        let cut = self.at(most).filter(|one| one.start < most);
        match cut.filter(|one| one.image.is_bidirectional) {
            Some(one) if one.start > first => one.start,
            Some(one) => one.end(),
            None => most,
        }
    }

    /// Returns how many of the first `common` tokens of a text can be reused, if another text has
    /// them in common. An image is not cut if its tokens attend to each other. It is not reused by
    /// fewer tokens than identify it.
    pub fn reusable(&self, common: usize) -> usize {
        let mut begun = self.0.iter().take_while(|one| one.start < common);
        let unusable = begun.find(|one| {
            let is_cut = one.end() > common;
            let shared = common.min(one.end()) - one.start;
            shared < MIN_IDENTIFYING_TOKENS || is_cut && one.image.is_bidirectional
        });
        unusable.map_or(common, |one| one.start)
    }

    /// Returns the images in order.
    pub fn iter(&self) -> impl Iterator<Item = &PlacedImage> {
        self.0.iter()
    }

    /// Appends token `at` of a text to a batch, for sequence `sequence`.
    ///
    /// # Errors
    /// Returns the error of an encoder, or one if an embedding has the wrong size.
    pub fn add_to(
        &self,
        batch: &mut Batch,
        at: usize,
        id: u32,
        sequence: u32,
        wants_logits: bool,
    ) -> Result<()> {
        let to_position = |at: usize| i32::try_from(at).unwrap_or(i32::MAX);
        let position = to_position(at);
        let Some(one) = self.at(at) else {
            batch.add(id, position, &[sequence], wants_logits);
            batch.set_last_positions([to_position(self.position(at)); 3], position);
            return Ok(());
        };
        let image = &one.image;
        let rows = image.rows()?;
        let (index, width) = (at - one.start, rows.len() / image.len());
        let row = rows.get(index * width..(index + 1) * width);
        let row = row.filter(|_| width * image.len() == rows.len());
        let row = row.ok_or_else(|| Error::invalid("an image has a wrong number of rows"))?;
        batch.add_embedding(row, position, &[sequence], wants_logits);
        let first = self.position(one.start);
        let axes = match image.grid {
            Some([columns, _]) => [first, first + index / columns, first + index % columns],
            None => [first + index; 3],
        };
        let last_attended = if image.is_bidirectional {
            to_position(one.end() - 1)
        } else {
            position
        };
        batch.set_last_positions(axes.map(to_position), last_attended);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(number: u8, grid: [usize; 2]) -> ImageTokens {
        let count = grid[0] * grid[1];
        ImageTokens::new([number; 32], grid, move || {
            Ok(vec![number.into(); 2 * count])
        })
    }

    #[test]
    fn positions_jump_over_an_image_by_its_longer_side() {
        let first = Arc::new(image(1, [3, 2]));
        let second = Arc::new(image(2, [1, 4]).on_one_axis().bidirectional());
        let mut tokens = vec![7];
        let mut placed = Vec::new();
        for image in [first, second] {
            placed.push(PlacedImage {
                start: tokens.len(),
                image: Arc::clone(&image),
            });
            tokens.extend(image.ids());
            tokens.push(8);
        }
        let images = Images::new(placed, &tokens).unwrap();
        let mut batch = Batch::new();
        for (at, &id) in tokens.iter().enumerate() {
            images.add_to(&mut batch, at, id, 0, false).unwrap();
        }
        let axes: Vec<[i32; 3]> = batch.tokens().iter().map(|token| token.axes).collect();
        let grid = [
            [1, 1, 1],
            [1, 1, 2],
            [1, 1, 3],
            [1, 2, 1],
            [1, 2, 2],
            [1, 2, 3],
        ];
        assert_eq!(axes[0], [0; 3]);
        assert_eq!(axes[1..7], grid);
        let line: Vec<[i32; 3]> = (4..10).map(|position| [position; 3]).collect();
        assert_eq!(axes[7..], line);
        let last_attended = batch.tokens().iter().map(|token| token.last_attended);
        assert!(last_attended.eq((0..8).chain([11; 4]).chain([12])));
        let orders = batch.tokens().iter().map(|token| token.position);
        assert!(orders.eq(0..13));
        // An image is cut if its tokens do not attend to each other, and if enough are left.
        let reusable = [1, 2, 4, 5, 8, 9, 11, 12, 13].map(|at| images.reusable(at));
        assert_eq!(reusable, [1, 1, 1, 5, 8, 8, 8, 12, 13]);
        assert_eq!(images.end_of_batch(0, 10), 8);
        assert_eq!(images.end_of_batch(8, 10), 12);
        assert_eq!(images.end_of_batch(0, 3), 3);
    }

    #[test]
    fn texts_and_images_must_match() {
        let one = Arc::new(image(1, [2, 2]));
        let placed = |start| {
            vec![PlacedImage {
                start,
                image: Arc::clone(&one),
            }]
        };
        let tokens: Vec<u32> = [5].into_iter().chain(one.ids().iter().copied()).collect();
        assert!(Images::new(placed(1), &tokens).is_ok());
        for (placed, tokens) in [
            (placed(0), &tokens[..]),
            (placed(1), &tokens[..4]),
            (placed(9), &tokens),
            (Vec::new(), &tokens),
        ] {
            assert!(Images::new(placed, tokens).is_err());
        }
        assert_ne!(one.ids(), image(2, [2, 2]).ids());
    }
}
