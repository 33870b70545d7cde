//! Projectors, and what differs between them besides their graphs.

use crate::error::{Error, Result};
use crate::resample::Filter;

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
    /// Idefics3 and SmolVLM: tiles, whose 2 x 2 or more patches become one row of a matrix.
    Idefics3,
    /// InternVL: tiles, whose 2 x 2 patches become one row of a two-layer network after a norm.
    InternVl,
    /// Pixtral and Mistral Small 3.1: a two-layer network, perhaps after a matrix that merges 2 x 2
    /// patches. A row of its own follows each row of the image but the last one.
    Pixtral,
    /// LLaVA 1.5: a two-layer network.
    Mlp,
    /// LFM2-VL: tiles of large images; 2 x 2 patches become one row of a two-layer network.
    Lfm2,
    /// Gemma 4: means of 3 x 3 patches, and a matrix.
    Gemma4V,
}

/// Use of an encoder's table of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PositionTable {
    /// The encoder has no table.
    None,
    /// A row for each patch.
    Plain,
    /// Four rows around each patch, of a table whose corners are those of the image.
    Stretched,
    /// A table that is resized like an image.
    Resized,
    /// The sum of a row of a table of columns, and of one of a table of rows.
    Axes,
}

impl Projector {
    const ALL: [(Projector, &str); 10] = [
        (Projector::Qwen2Vl, "qwen2vl_merger"),
        (Projector::Qwen25Vl, "qwen2.5vl_merger"),
        (Projector::Qwen3Vl, "qwen3vl_merger"),
        (Projector::Gemma3, "gemma3"),
        (Projector::Idefics3, "idefics3"),
        (Projector::InternVl, "internvl"),
        (Projector::Pixtral, "pixtral"),
        (Projector::Mlp, "mlp"),
        (Projector::Lfm2, "lfm2"),
        (Projector::Gemma4V, "gemma4v"),
    ];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        let known = Self::ALL.iter().find(|(projector, _)| *projector == self);
        known.map_or("", |(_, name)| name)
    }

    pub(crate) fn from_name(name: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, known)| *known == name);
        known.map(|(projector, _)| *projector).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(_, name)| *name).collect();
            let names = names.join(", ");
            let message = format!("projector {name:?} is not supported; supported are {names}");
            Error::Unsupported(message.into())
        })
    }

    /// Returns the texts before, between and after the tiles of an image: `columns` x `rows` tiles,
    /// if it has any, and the whole image.
    pub fn texts(self, [columns, rows]: [usize; 2]) -> Vec<String> {
        let [open, close] = self.delimiters();
        let places = (1..=rows).flat_map(|row| (1..=columns).map(move |column| (row, column)));
        let mut texts: Vec<String> = places
            .map(|(row, column)| self.before_tile(row, column))
            .collect();
        texts.push(self.before_whole(!texts.is_empty()).into());
        texts[0].insert_str(0, open);
        texts.push(close.into());
        texts
    }

    /// Returns the texts before and after an image.
    fn delimiters(self) -> [&'static str; 2] {
        match self {
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl => {
                ["<|vision_start|>", "<|vision_end|>"]
            }
            Projector::Gemma3 => ["<start_of_image>", "<end_of_image>"],
            Projector::Idefics3 => ["", "<fake_token_around_image>"],
            Projector::InternVl => ["<img>", "</img>"],
            Projector::Pixtral => ["", "[IMG_END]"],
            Projector::Mlp => ["", ""],
            Projector::Lfm2 => ["<|image_start|>", "<|image_end|>"],
            Projector::Gemma4V => ["<|image>", "<image|>"],
        }
    }

    /// Returns the text before a tile. Rows and columns begin with 1.
    fn before_tile(self, row: usize, column: usize) -> String {
        match self {
            Projector::Idefics3 => {
                let line = if row > 1 && column == 1 { "\n" } else { "" };
                format!("{line}<fake_token_around_image><row_{row}_col_{column}>")
            }
            Projector::Lfm2 => format!("<|img_row_{row}_col_{column}|>"),
            _ => String::new(),
        }
    }

    /// Returns the text before the whole image.
    fn before_whole(self, has_tiles: bool) -> &'static str {
        match self {
            Projector::Idefics3 if has_tiles => "\n\n<fake_token_around_image><global-img>",
            Projector::Idefics3 => "<fake_token_around_image><global-img>",
            Projector::Lfm2 if has_tiles => "<|img_thumbnail|>",
            _ => "",
        }
    }

    /// Returns the filter that resizes images.
    pub(crate) fn filter(self) -> Filter {
        match self {
            Projector::Gemma3 => Filter::Bilinear,
            Projector::Idefics3 => Filter::Lanczos,
            Projector::Lfm2 => Filter::TorchBilinear,
            _ => Filter::Bicubic,
        }
    }

    /// Returns the use of the table of positions.
    pub(crate) fn table(self) -> PositionTable {
        match self {
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Pixtral => PositionTable::None,
            Projector::Qwen3Vl => PositionTable::Stretched,
            Projector::Lfm2 => PositionTable::Resized,
            Projector::Gemma4V => PositionTable::Axes,
            _ => PositionTable::Plain,
        }
    }

    /// Returns whether queries and keys are rotated by the place of their patch.
    pub(crate) fn rotates(self) -> bool {
        self.reads_frames() || matches!(self, Projector::Pixtral | Projector::Gemma4V)
    }

    /// Returns whether a token follows each row of an image but the last one.
    pub(crate) fn has_breaks(self) -> bool {
        matches!(self, Projector::Pixtral)
    }

    /// Returns whether the encoder reads an image as a video of two equal frames.
    pub(crate) fn reads_frames(self) -> bool {
        self.has_grid_positions()
    }

    /// Returns whether the rows have positions of a grid in the language model (M-RoPE).
    pub fn has_grid_positions(self) -> bool {
        matches!(
            self,
            Projector::Qwen2Vl | Projector::Qwen25Vl | Projector::Qwen3Vl
        )
    }
}
