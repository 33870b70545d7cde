//! Images as `data:` URLs, as clients send them.

use crate::error::{Error, Result};
use ::image::ImageFormat;
use base64::Engine;
use base64::alphabet::STANDARD as STANDARD_ALPHABET;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};

/// Base64 with or without padding.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD_ALPHABET,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns the file of an image from a `data:` URL, or from base64 alone.
///
/// # Errors
/// Returns [`Error::Image`] for other URLs, which are not fetched, and for what is not base64.
pub fn image_file(url: &str) -> Result<Vec<u8>> {
    let encoded = match url.strip_prefix("data:") {
        Some(data) => {
            let (kind, encoded) = data.split_once(',').unwrap_or_default();
            let is_file =
                kind.starts_with("image/") || kind.starts_with("application/octet-stream");
            if !is_file || !kind.ends_with(";base64") {
                return Err(Error::image(
                    "must be a URL such as data:image/png;base64,… of an image in base64",
                ));
            }
            encoded
        }
        None if url.contains("://") => {
            return Err(Error::image(
                "URLs are not fetched: send the image itself, as data:image/png;base64,…",
            ));
        }
        None => url,
    };
    // Some encoders break lines, or leave out the padding.
    let has_space = encoded.bytes().any(|byte| byte.is_ascii_whitespace());
    let file = if has_space {
        let mut bytes = encoded.as_bytes().to_vec();
        bytes.retain(|byte| !byte.is_ascii_whitespace());
        LENIENT.decode(bytes)
    } else {
        LENIENT.decode(encoded)
    };
    file.map_err(|error| {
        Error::image(format!(
            "is not base64: {error}; send the image itself, as data:image/png;base64,…"
        ))
    })
}

/// Returns the maximum bytes of the file in a URL of this length.
pub fn image_file_len(url: usize) -> usize {
    url / 4 * 3 + 3
}

/// Returns the `data:` URL of an image file.
pub fn image_url(file: &[u8]) -> String {
    let kind = ::image::guess_format(file).unwrap_or(ImageFormat::Png);
    format!(
        "data:{};base64,{}",
        kind.to_mime_type(),
        STANDARD.encode(file)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_survive_their_urls() {
        let files: [&[u8]; 3] = [b"\x89PNG\r\n\x1a\n", b"GIF89a", b""];
        for (file, kind) in files.into_iter().zip(["png", "gif", "png"]) {
            let url = image_url(file);
            assert!(
                url.starts_with(&format!("data:image/{kind};base64,")),
                "{url}"
            );
            assert_eq!(image_file(&url).unwrap(), file);
            assert!(image_file_len(url.len()) >= file.len());
            let (_, encoded) = url.split_once(',').unwrap();
            assert_eq!(image_file(encoded).unwrap(), file);
            let broken = encoded.trim_end_matches('=').replace('A', "A\n");
            assert_eq!(image_file(&broken).unwrap(), file);
        }
        for url in [
            "https://a/b.png",
            "file:///a",
            "data:text/html;base64,",
            "data:image/png,A",
            "?",
        ] {
            assert!(image_file(url).is_err(), "{url}");
        }
    }
}
