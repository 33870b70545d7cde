//! `samite quantize --bench`: measures how fast types are encoded and decoded.

use crate::failure::{CommandError, CommandResult};
use samite::quant::{can_decode, can_encode, can_quantize, decode_row, encode_row, quantize_row};
use samite::text::Rng;
use samite::{CancelToken, DType};
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// Elements per row, and rows: 1 MiB of F32, which fits into caches.
const ROW: usize = 4096;
const ROWS: usize = 64;

/// Minimum time of each measurement.
const LEAST: Duration = Duration::from_millis(100);

/// Parses a type that can be measured.
pub fn dtype(name: &str) -> Result<DType, String> {
    all()
        .find(|dtype| dtype.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            let names: Vec<_> = all().map(DType::name).collect();
            format!("must be one of {}", names.join(", "))
        })
}

/// Returns all types that can be both encoded and decoded.
fn all() -> impl Iterator<Item = DType> {
    let both = |dtype: &DType| can_quantize(*dtype) && can_decode(*dtype);
    DType::all().filter(both)
}

/// Encodes a row with the fastest method.
fn encode(dtype: DType, row: &[f32], out: &mut [u8]) -> CommandResult {
    let encoded = if can_encode(dtype) {
        encode_row(dtype, row, out)
    } else {
        quantize_row(dtype, row, Some(&[1.0; ROW]), out)
    };
    encoded.map_err(CommandError::error)
}

/// Returns the elements per second of a method that goes through all rows repeatedly.
fn elements_per_second(mut row: impl FnMut(usize) -> CommandResult) -> CommandResult<f64> {
    row(0)?;
    let started = Instant::now();
    let mut rows = 0;
    loop {
        row(rows % ROWS)?;
        rows += 1;
        let elapsed = started.elapsed();
        if elapsed >= LEAST {
            return Ok((rows * ROW) as f64 / elapsed.as_secs_f64());
        }
    }
}

pub fn run(types: &[DType], as_json: bool, cancel: &CancelToken) -> CommandResult {
    let types = match types {
        [] => all().collect(),
        types => types.to_vec(),
    };
    let mut rng = Rng::new(1);
    let values: Vec<f32> = (0..ROW * ROWS)
        .map(|_| rng.uniform() as f32 - 0.5)
        .collect();
    let mut out = std::io::stdout().lock();
    if !as_json {
        writeln!(
            out,
            "{:<8} {:>26} {:>26}",
            "type", "encoding, GB/s of F32", "decoding, GB/s of F32"
        )?;
    }
    let mut found = Vec::new();
    for dtype in types {
        cancel.check()?;
        let bytes = dtype.row_bytes(ROW).map_err(CommandError::error)?;
        let mut encoded = vec![0; bytes * ROWS];
        for (row, encoded) in values.chunks(ROW).zip(encoded.chunks_mut(bytes)) {
            encode(dtype, row, encoded)?;
        }
        let mut once = vec![0; bytes];
        let encoding = elements_per_second(|row| {
            let values = &values[row * ROW..][..ROW];
            encode(dtype, values, &mut once)
        })?;
        let mut decoded = vec![0.0; ROW];
        let decoding = elements_per_second(|row| {
            let encoded = &encoded[row * bytes..][..bytes];
            decode_row(dtype, encoded, &mut decoded).map_err(CommandError::error)
        })?;
        if as_json {
            found.push(json!({
                "type": dtype.name(),
                "encoded_elements_per_second": encoding,
                "decoded_elements_per_second": decoding,
            }));
        } else {
            let rate = |elements: f64| {
                format!(
                    "{:.2} ({:.0} M elements/s)",
                    elements * 4.0 / 1e9,
                    elements / 1e6
                )
            };
            writeln!(
                out,
                "{:<8} {:>26} {:>26}",
                dtype.name(),
                rate(encoding),
                rate(decoding)
            )?;
            out.flush()?;
        }
    }
    if as_json {
        writeln!(out, "{:#}", serde_json::Value::from(found))?;
    }
    Ok(())
}
