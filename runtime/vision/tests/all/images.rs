//! Images are decoded and resized as Pillow does it: fixtures of `oracle.py`.

use crate::{expectations, fnv, image};
use samite_vision::{DecodeLimits, EncodedImage, Error, Filter, RgbImage};
use serde_json::Value;

fn bytes(value: &Value) -> Vec<u8> {
    let values = value.as_array().unwrap().iter();
    values.map(|value| value.as_u64().unwrap() as u8).collect()
}

fn decode(file: &[u8]) -> Result<RgbImage, Error> {
    EncodedImage::new(file, &DecodeLimits::default())?.decode()
}

#[test]
fn resized_images_equal_pillows() {
    let cases = expectations("resized.json");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 500);
    for case in cases {
        let extent = |at: usize| case[at].as_u64().unwrap() as usize;
        let filter = match case[4].as_str().unwrap() {
            "bilinear" => Filter::Bilinear,
            "bicubic" => Filter::Bicubic,
            _ => Filter::Lanczos,
        };
        let resized = image(extent(0), extent(1)).resized(extent(2), extent(3), filter);
        assert_eq!(fnv(resized.unwrap().pixels()), case[5], "{case}");
    }
}

#[test]
fn decoded_files_equal_pillows() {
    for case in expectations("decoded.json")["cases"].as_array().unwrap() {
        let name = &case["name"];
        let image = decode(&bytes(&case["file"])).unwrap();
        let size = [image.width() as u64, image.height() as u64];
        let expected = [0, 1].map(|at| case["size"][at].as_u64().unwrap());
        assert_eq!(size, expected, "{name}");
        match &case["pixels"] {
            Value::String(hash) => assert_eq!(fnv(image.pixels()), *hash, "{name}"),
            // The standard lets decoders differ by one in each step.
            pixels => {
                let far = bytes(pixels);
                let far = far
                    .iter()
                    .zip(image.pixels())
                    .map(|(a, b)| a.abs_diff(*b))
                    .max();
                assert!(far.unwrap() <= 3, "{name}: {far:?}");
            }
        }
    }
}

#[test]
fn damaged_files_are_errors() {
    let cases = expectations("decoded.json");
    for case in cases["cases"].as_array().unwrap() {
        let file = bytes(&case["file"]);
        for end in (0..file.len()).step_by(7) {
            let _ = decode(&file[..end]);
        }
        for at in (0..file.len()).step_by(5) {
            for flip in [0xff, 0x10] {
                let mut changed = file.clone();
                changed[at] ^= flip;
                let _ = decode(&changed);
            }
        }
    }
    for (file, what) in [
        (&b""[..], "PNG, JPEG, WebP or GIF"),
        (b"%PDF-1.7", "PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n", "the PNG image cannot be decoded"),
        (b"GIF89a", "the GIF image cannot be decoded"),
    ] {
        let error = decode(file).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn truncated_jpegs_are_refused_although_their_thumbnail_is_whole() {
    let cases = expectations("decoded.json");
    let cases = cases["cases"].as_array().unwrap().iter();
    let mut files = cases
        .map(|case| bytes(&case["file"]))
        .filter(|file| file[0] == 0xff);
    let file = files.next().unwrap();
    let mut cut = file[..file.len() - 2].to_vec();
    // An application segment with the end of a thumbnail.
    cut.splice(2..2, [0xff, 0xe1, 0, 6, 0xff, 0xd9, 0xff, 0xd9]);
    let error = decode(&cut).unwrap_err().to_string();
    assert!(error.contains("truncated"), "{error}");
    cut.extend([0xff, 0xd9]);
    decode(&cut).unwrap();
}

#[test]
fn images_that_are_too_large_are_refused_by_their_header() {
    let cases = expectations("decoded.json");
    let mut file = bytes(&cases["cases"][0]["file"]);
    // The width and height of a PNG file, and the checksum of its header.
    file[16..24].copy_from_slice(&[0, 0, 0xc3, 0x50, 0, 0, 0xc3, 0x50]);
    let crc = crc32(&file[12..29]);
    file[29..33].copy_from_slice(&crc.to_be_bytes());
    let error = decode(&file).unwrap_err().to_string();
    assert!(error.contains("50000 x 50000"), "{error}");
    // Wider than any camera's, though it has few pixels.
    file[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 1]);
    let crc = crc32(&file[12..29]);
    file[29..33].copy_from_slice(&crc.to_be_bytes());
    let error = decode(&file).unwrap_err().to_string();
    assert!(error.contains("65536 x 1"), "{error}");
    let limits = DecodeLimits { pixels: 76 };
    let file = bytes(&cases["cases"][0]["file"]);
    let error = EncodedImage::new(&file, &limits).unwrap_err().to_string();
    assert!(error.contains("from 1 to 76"), "{error}");
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 * (crc & 1))
        })
    })
}
