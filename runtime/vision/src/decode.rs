//! Decoding of PNG, JPEG, WebP and GIF files, within limits that are checked before memory is
//! allocated.

use crate::error::{Error, Result};
use crate::rgb::RgbImage;
use ::image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use ::image::metadata::Orientation;
use ::image::{DynamicImage, ImageDecoder, ImageFormat, Limits};
use std::io::Cursor;

/// Default of [`DecodeLimits::pixels`].
pub const DEFAULT_MAX_PIXELS: u64 = 64 << 20;

/// Bytes of memory for each pixel while an image is decoded, besides the decoded channels: what a
/// decoder keeps itself, at most four, and the three of the result.
const BYTES_PER_PIXEL: u64 = 4 + 3;

/// Maximum bytes of memory for each pixel: 16 bits for each of four channels, twice while the image
/// is rotated, and the three of the result.
const MAX_BYTES_PER_PIXEL: u64 = 2 * 8 + 3;

/// Maximum width and height.
const MAX_EXTENT: u32 = 65_535;

/// Maximum memory for what a PNG file has besides its pixels, such as a color profile.
pub const MAX_PROFILE_BYTES: u64 = 4 << 20;

/// Limits of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Maximum number of pixels.
    pub pixels: u64,
}

impl Default for DecodeLimits {
    fn default() -> Self {
        DecodeLimits {
            pixels: DEFAULT_MAX_PIXELS,
        }
    }
}

/// An encoded image whose header was read.
pub struct EncodedImage<'a> {
    decoder: Box<dyn ImageDecoder + 'a>,
    orientation: Orientation,
    size: [u32; 2],
    file_bytes: u64,
}

impl std::fmt::Debug for EncodedImage<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("EncodedImage");
        debug.field("size", &self.size).finish_non_exhaustive()
    }
}

impl<'a> EncodedImage<'a> {
    /// Reads the header of a PNG, JPEG, WebP or GIF file.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if the file has another format, is damaged, or exceeds the limits.
    pub fn new(bytes: &'a [u8], limits: &DecodeLimits) -> Result<Self> {
        let format = ::image::guess_format(bytes).ok();
        let named = |error| failed(format, error);
        let input = Cursor::new(bytes);
        let mut decoder: Box<dyn ImageDecoder + 'a> = match format {
            Some(ImageFormat::Png) => {
                let mut memory = Limits::no_limits();
                memory.max_alloc = Some(MAX_PROFILE_BYTES);
                Box::new(PngDecoder::with_limits(input, memory).map_err(named)?)
            }
            Some(ImageFormat::Jpeg) if !jpeg_has_end(bytes) => {
                return Err(Error::image("the JPEG image is truncated"));
            }
            Some(ImageFormat::Jpeg) => Box::new(JpegDecoder::new(input).map_err(named)?),
            Some(ImageFormat::WebP) => Box::new(WebPDecoder::new(input).map_err(named)?),
            Some(ImageFormat::Gif) => Box::new(GifDecoder::new(input).map_err(named)?),
            _ => {
                return Err(Error::image(
                    "the image is not a PNG, JPEG, WebP or GIF file: convert it to one of them",
                ));
            }
        };
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        if pixels == 0 || pixels > limits.pixels || width.max(height) > MAX_EXTENT {
            return Err(Error::image(format!(
                "the image has {width} x {height} pixels, and from 1 to {} are allowed, at most {MAX_EXTENT} in each direction: make it smaller",
                limits.pixels
            )));
        }
        let mut memory = Limits::no_limits();
        memory.max_alloc = Some(limits.pixels.saturating_mul(MAX_BYTES_PER_PIXEL));
        decoder.set_limits(memory).map_err(named)?;
        Ok(EncodedImage {
            orientation: decoder.orientation().map_err(named)?,
            decoder,
            size: [width, height],
            file_bytes: bytes.len() as u64,
        })
    }

    /// Returns the width and height in pixels, before the EXIF orientation is applied.
    pub fn size(&self) -> [usize; 2] {
        self.size.map(|extent| extent as usize)
    }

    /// Returns the bytes of memory that decoding takes at most, including the result.
    pub fn decoding_bytes(&self) -> u64 {
        let [width, height] = self.size.map(u64::from);
        let pixels = width.saturating_mul(height);
        // A rotation has a copy of the pixels.
        let copies = 1 + u64::from(self.orientation != Orientation::NoTransforms);
        let decoded = self.decoder.total_bytes().saturating_mul(copies);
        let beside = pixels.saturating_mul(BYTES_PER_PIXEL);
        decoded
            .saturating_add(beside)
            .saturating_add(self.file_bytes)
    }

    /// Decodes the image, or the first one of an animation. Applies the EXIF orientation. Drops
    /// transparency, as Pillow's conversion to RGB does.
    ///
    /// # Errors
    /// Returns [`Error::Image`] if the file is damaged.
    pub fn decode(self) -> Result<RgbImage> {
        let image = DynamicImage::from_decoder(self.decoder);
        let mut image = image.map_err(|error| failed(None, error))?;
        image.apply_orientation(self.orientation);
        let [width, height] = [image.width() as usize, image.height() as usize];
        RgbImage::new(width, height, rgb(image))
    }
}

/// Returns whether a JPEG file has an end-of-image marker after the start of its scan. The decoder
/// fills what is missing with grey.
fn jpeg_has_end(bytes: &[u8]) -> bool {
    let mut at = 2;
    // Segments with their lengths: one of them can have a thumbnail, which has an end of its own.
    while let Some(&[0xff, kind, high, low]) = bytes.get(at..).and_then(<[u8]>::first_chunk) {
        match kind {
            0xda => return bytes[at..].windows(2).any(|pair| pair == [0xff, 0xd9]),
            // Fill bytes, and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd7 => at += 2,
            _ => at += 2 + usize::from(u16::from_be_bytes([high, low])),
        }
    }
    false
}

fn failed(format: Option<ImageFormat>, error: ::image::ImageError) -> Error {
    let name = match format {
        Some(ImageFormat::Png) => "the PNG image",
        Some(ImageFormat::Jpeg) => "the JPEG image",
        Some(ImageFormat::WebP) => "the WebP image",
        Some(ImageFormat::Gif) => "the GIF image",
        _ => "the image",
    };
    Error::image(format!("{name} cannot be decoded: {error}"))
}

/// Returns the pixels in RGB. Of 16 bits, the upper ones remain, as in llama.cpp; Pillow makes
/// nearly all grey values of 16 bits white.
fn rgb(image: DynamicImage) -> Vec<u8> {
    let upper = |value: u16| (value >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(pixels) => pixels.into_raw(),
        DynamicImage::ImageLuma16(pixels) => {
            let values = pixels.into_raw().into_iter();
            values.flat_map(|grey| [upper(grey); 3]).collect()
        }
        DynamicImage::ImageLumaA16(pixels) => {
            let pixels = pixels.into_raw();
            let pixels = pixels.chunks_exact(2);
            pixels.flat_map(|pixel| [upper(pixel[0]); 3]).collect()
        }
        DynamicImage::ImageRgb16(pixels) => pixels.into_raw().into_iter().map(upper).collect(),
        DynamicImage::ImageRgba16(pixels) => {
            let pixels = pixels.into_raw();
            let pixels = pixels.chunks_exact(4);
            pixels
                .flat_map(|pixel| [upper(pixel[0]), upper(pixel[1]), upper(pixel[2])])
                .collect()
        }
        other => other.into_rgb8().into_raw(),
    }
}
