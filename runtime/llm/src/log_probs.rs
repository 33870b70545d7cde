//! Files of log-probabilities, compatible with `llama-perplexity --kl-divergence-base`.
//!
//! A file holds a text in chunks of tokens, and for the second half of each chunk the
//! log-probability that a model gave to every token of its vocabulary. All numbers are
//! little-endian:
//!
//! | field | type | value |
//! |---|---|---|
//! | magic | 8 bytes | `_logits_` |
//! | `n_ctx` | u32 | tokens per chunk |
//! | `n_vocab` | i32 | tokens of the vocabulary |
//! | `n_chunk` | i32 | number of chunks |
//! | tokens | i32, `n_chunk * n_ctx` | the text |
//! | rows | `n_chunk * (n_ctx - 1 - n_ctx / 2)` | the log-probabilities |
//!
//! Row `i` of a chunk predicts the token at position `n_ctx / 2 + i + 1`:
//!
//! | field | type | value |
//! |---|---|---|
//! | scale | f32 | difference of log-probabilities whose codes differ by 1 |
//! | minimum | f32 | log-probability of code 0 |
//! | codes | u16, `n_vocab` rounded up to an even number | `(log-probability - minimum) / scale` |
//!
//! Code 65535 is the most likely token of the row. A writer raises log-probabilities that are more
//! than 16 below it to that limit. The first token of a chunk is the text's, although a model that
//! starts texts with a BOS token decodes the BOS token instead.

use crate::error::{Error, Result, try_filled};
use crate::perplexity::MIN_CHUNK;
use samite_gguf::ErrorKind;
use std::io::{Read, Write};

const MAGIC: &[u8; 8] = b"_logits_";
/// Bytes before the tokens.
const HEADER_BYTES: u64 = 20;
/// Bytes of scale and minimum.
const SCALE_BYTES: u64 = 8;
/// Code of the most likely token of a row.
const MAX_CODE: u16 = u16::MAX;
/// Maximum difference between the largest log-probability of a row and its minimum.
pub(crate) const MAX_RANGE: f32 = 16.0;

const WRITE_AGAIN: &str = "write the file again";

/// Extents of a file, checked against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extents {
    n_ctx: usize,
    n_vocab: usize,
    n_chunk: usize,
}

impl Extents {
    fn rows_per_chunk(&self) -> usize {
        self.n_ctx.saturating_sub(1 + self.n_ctx / 2)
    }

    /// Returns the number of codes in a row, including padding.
    fn codes_per_row(&self) -> usize {
        self.n_vocab.next_multiple_of(2)
    }

    fn tokens(&self) -> Option<usize> {
        self.n_ctx.checked_mul(self.n_chunk)
    }

    fn rows(&self) -> Option<usize> {
        self.rows_per_chunk().checked_mul(self.n_chunk)
    }

    /// Returns the size of the whole file in bytes.
    fn file_bytes(&self) -> Option<u64> {
        let tokens = u64::try_from(self.tokens()?).ok()?.checked_mul(4)?;
        let codes = u64::try_from(self.codes_per_row()).ok()?.checked_mul(2)?;
        let row = codes.checked_add(SCALE_BYTES)?;
        let rows = u64::try_from(self.rows()?).ok()?.checked_mul(row)?;
        HEADER_BYTES.checked_add(tokens)?.checked_add(rows)
    }
}

/// The log-probabilities of one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbsRow<'a> {
    /// Difference of log-probabilities whose codes differ by 1.
    pub scale: f32,
    /// Log-probability of code 0.
    pub minimum: f32,
    /// One code per token of the vocabulary.
    pub codes: &'a [u16],
}

impl LogProbsRow<'_> {
    /// Returns the log-probability of `code`, in nats.
    pub fn log_prob(&self, code: u16) -> f64 {
        f64::from(self.scale) * f64::from(code) + f64::from(self.minimum)
    }
}

/// Encodes log-probabilities as 16-bit codes and returns scale and minimum.
///
/// `max` is the largest logit, and `log_sum_exp` the logarithm of the sum of `exp(logit - max)`.
/// The arithmetic is in `f32`, in the order of llama.cpp, so that both programs write the same
/// codes.
fn encode(logits: &[f32], max: f32, log_sum_exp: f64, codes: &mut [u16]) -> [f32; 2] {
    let min = logits.iter().copied().fold(max, f32::min);
    let min = min.max(max - MAX_RANGE);
    let scale = (max - min) / f32::from(MAX_CODE);
    let minimum = min - max - log_sum_exp as f32;
    codes.fill(0);
    if scale > 0.0 {
        let inverse = 1.0 / scale;
        for (code, &logit) in codes.iter_mut().zip(logits) {
            if logit > min {
                *code = (inverse * (logit - min)).round_ties_even() as u16;
            }
        }
    }
    [scale, minimum]
}

/// Writes a file of log-probabilities.
#[derive(Debug)]
pub struct LogProbsWriter<W> {
    output: W,
    codes: Vec<u16>,
    rows_left: usize,
    n_vocab: usize,
}

impl<W: Write> LogProbsWriter<W> {
    /// Writes the header and the tokens of all chunks.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `tokens` are not one or more chunks of `n_ctx` tokens,
    /// or if the numbers do not fit into the format. Returns [`Error::Gguf`] if writing fails.
    pub fn new(mut output: W, n_ctx: usize, n_vocab: usize, tokens: &[u32]) -> Result<Self> {
        let n_chunk = tokens.len() / n_ctx.max(1);
        let extents = Extents {
            n_ctx,
            n_vocab,
            n_chunk,
        };
        let numbers = [n_ctx, n_vocab, n_chunk].map(|number| i32::try_from(number).ok());
        let (Some(rows), [Some(ctx), Some(vocab), Some(chunks)]) = (
            extents.rows().filter(|_| {
                n_ctx >= MIN_CHUNK
                    && n_vocab > 0
                    && n_chunk > 0
                    && tokens.len().is_multiple_of(n_ctx)
            }),
            numbers,
        ) else {
            return Err(Error::invalid(format!(
                "{} tokens in chunks of {n_ctx}, with a vocabulary of {n_vocab}: \
                 a file of log-probabilities needs whole chunks of at least {MIN_CHUNK} tokens",
                tokens.len()
            )));
        };
        let codes = try_filled(
            0,
            Some(extents.codes_per_row()),
            "a row of log-probabilities",
        )?;
        let mut put = |bytes: &[u8]| {
            output
                .write_all(bytes)
                .map_err(|error| cannot_write(&error))
        };
        put(MAGIC)?;
        for number in [ctx, vocab, chunks] {
            put(&number.to_le_bytes())?;
        }
        for token in tokens {
            put(&token.to_le_bytes())?;
        }
        Ok(LogProbsWriter {
            output,
            codes,
            rows_left: rows,
            n_vocab,
        })
    }

    /// Writes the row of the next position.
    ///
    /// `max` is the largest logit, and `log_sum_exp` the logarithm of the sum of `exp(logit -
    /// max)`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `logits` do not match the vocabulary, or if all rows
    /// are written. Returns [`Error::Gguf`] if writing fails.
    pub fn write_row(&mut self, logits: &[f32], max: f32, log_sum_exp: f64) -> Result<()> {
        if logits.len() != self.n_vocab || self.rows_left == 0 {
            return Err(Error::invalid(format!(
                "a row of {} logits does not fit: {} more rows of {} are expected",
                logits.len(),
                self.rows_left,
                self.n_vocab
            )));
        }
        self.rows_left -= 1;
        let mut put = |bytes: &[u8]| {
            let written = self.output.write_all(bytes);
            written.map_err(|error| cannot_write(&error))
        };
        for number in encode(logits, max, log_sum_exp, &mut self.codes) {
            put(&number.to_le_bytes())?;
        }
        if cfg!(target_endian = "big") {
            self.codes.iter_mut().for_each(|code| *code = code.to_le());
        }
        put(bytemuck::cast_slice(&self.codes))
    }

    /// Returns the output of a complete file.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if rows are missing.
    pub fn finish(self) -> Result<W> {
        match self.rows_left {
            0 => Ok(self.output),
            left => Err(Error::invalid(format!(
                "{left} rows of log-probabilities are missing"
            ))),
        }
    }
}

/// Reads a file of log-probabilities, row by row.
#[derive(Debug)]
pub struct LogProbsReader<R> {
    input: R,
    extents: Extents,
    tokens: Vec<u32>,
    codes: Vec<u16>,
    rows_read: usize,
}

impl<R: Read> LogProbsReader<R> {
    /// Reads the header and the tokens of a file of `length` bytes.
    ///
    /// Allocates nothing before the header is consistent with `length`. The rest of `input` is read
    /// in small pieces and should be buffered.
    ///
    /// # Errors
    /// Returns [`Error::Gguf`] if the file has another format, is truncated, or is contradictory.
    /// Returns [`Error::Core`] if there is no memory for its tokens.
    pub fn new(mut input: R, length: u64) -> Result<Self> {
        let mut magic = [0; MAGIC.len()];
        if length < MAGIC.len() as u64 {
            return Err(not_log_probs());
        }
        fill(&mut input, &mut magic, "magic")?;
        if &magic != MAGIC {
            return Err(not_log_probs());
        }
        if length < HEADER_BYTES {
            return Err(truncated("header", format!("ends at byte {length}")));
        }
        let mut numbers = [[0; 4]; 3];
        fill(&mut input, numbers.as_flattened_mut(), "header")?;
        let [n_ctx, n_vocab, n_chunk] = numbers.map(i32::from_le_bytes);
        let extents = Extents {
            n_ctx: extent("n_ctx", n_ctx, MIN_CHUNK)?,
            n_vocab: extent("n_vocab", n_vocab, 1)?,
            n_chunk: extent("n_chunk", n_chunk, 1)?,
        };
        let about = format!("n_ctx {n_ctx}, n_vocab {n_vocab} and n_chunk {n_chunk}");
        let Some(expected) = extents.file_bytes() else {
            return Err(corrupt(
                "header",
                format!("{about} make a file larger than any; {WRITE_AGAIN}"),
            ));
        };
        if length < expected {
            return Err(truncated(
                "header",
                format!("{about} make {expected} bytes, but the file has {length}"),
            ));
        }
        if length > expected {
            return Err(corrupt(
                "header",
                format!(
                    "{about} make {expected} bytes, but the file has {length}: it is damaged; \
                     {WRITE_AGAIN}"
                ),
            ));
        }
        let mut tokens = try_filled(0u32, extents.tokens(), "the tokens of a text")?;
        fill(&mut input, bytemuck::cast_slice_mut(&mut tokens), "tokens")?;
        for (index, token) in tokens.iter_mut().enumerate() {
            *token = u32::from_le(*token);
            if *token as usize >= extents.n_vocab {
                return Err(corrupt(
                    format_args!(
                        "token {} of chunk {}",
                        index % extents.n_ctx,
                        index / extents.n_ctx + 1
                    ),
                    format!(
                        "is {}, but the vocabulary has {n_vocab} tokens; {WRITE_AGAIN}",
                        token.cast_signed()
                    ),
                ));
            }
        }
        let codes = try_filled(
            0,
            Some(extents.codes_per_row()),
            "a row of log-probabilities",
        )?;
        Ok(LogProbsReader {
            input,
            extents,
            tokens,
            codes,
            rows_read: 0,
        })
    }

    /// Returns the number of tokens per chunk.
    pub fn n_ctx(&self) -> usize {
        self.extents.n_ctx
    }

    /// Returns the number of tokens of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.extents.n_vocab
    }

    /// Returns the number of chunks, at least 1.
    pub fn n_chunk(&self) -> usize {
        self.extents.n_chunk
    }

    /// Returns the tokens of all chunks, each smaller than [`n_vocab`](Self::n_vocab).
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes the tokens out of the reader, which needs them no longer.
    pub(crate) fn take_tokens(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.tokens)
    }

    /// Checks that the file's vocabulary has the size of the model's.
    ///
    /// # Errors
    /// Returns [`Error::Gguf`] if the model's vocabulary does not have [`n_vocab`](Self::n_vocab)
    /// tokens.
    pub fn check_vocab(&self, model_vocab: usize) -> Result<()> {
        let n_vocab = self.n_vocab();
        if n_vocab == model_vocab {
            return Ok(());
        }
        Err(corrupt(
            "n_vocab",
            format!(
                "is {n_vocab}, but the model's vocabulary has {model_vocab} tokens; name a file \
                 of a model with the same vocabulary"
            ),
        ))
    }

    /// Reads the row of the next position.
    ///
    /// # Errors
    /// Returns [`Error::Gguf`] if the input ends or fails, or if the row's numbers are out of
    /// range.
    pub fn next_row(&mut self) -> Result<LogProbsRow<'_>> {
        let field = self.next_field();
        if Some(self.rows_read) == self.extents.rows() {
            return Err(Error::invalid("all rows of log-probabilities are read"));
        }
        self.rows_read += 1;
        let mut numbers = [[0; 4]; 2];
        fill(&mut self.input, numbers.as_flattened_mut(), &field)?;
        let [scale, minimum] = numbers.map(f32::from_le_bytes);
        // Scales of huge logits are rounded up.
        let is_scale = (0.0..=2.0 * MAX_RANGE / f32::from(MAX_CODE)).contains(&scale);
        if !is_scale || !minimum.is_finite() {
            return Err(corrupt(
                field,
                format!("scale {scale} and minimum {minimum} are out of range; {WRITE_AGAIN}"),
            ));
        }
        fill(
            &mut self.input,
            bytemuck::cast_slice_mut(&mut self.codes),
            &field,
        )?;
        if cfg!(target_endian = "big") {
            self.codes
                .iter_mut()
                .for_each(|code| *code = u16::from_le(*code));
        }
        let codes = self.codes.get(..self.extents.n_vocab).unwrap_or_default();
        Ok(LogProbsRow {
            scale,
            minimum,
            codes,
        })
    }

    /// Creates an error about the last row that was read: its probabilities do not sum to 1.
    pub(crate) fn not_normalized(&self, sum: f64) -> Error {
        corrupt(
            self.field(self.rows_read.saturating_sub(1)),
            format!("its probabilities sum to {sum}, not to 1: it is damaged; {WRITE_AGAIN}"),
        )
    }

    fn next_field(&self) -> String {
        self.field(self.rows_read)
    }

    /// Names a row in messages.
    fn field(&self, row: usize) -> String {
        let per_chunk = self.extents.rows_per_chunk().max(1);
        format!("row {} of chunk {}", row % per_chunk, row / per_chunk + 1)
    }
}

fn extent(field: &str, value: i32, min: usize) -> Result<usize> {
    let extent = usize::try_from(value).ok();
    let extent = extent.filter(|&extent| extent >= min);
    extent.ok_or_else(|| {
        corrupt(
            field,
            format!("is {value}, must be at least {min}; {WRITE_AGAIN}"),
        )
    })
}

fn fill(input: &mut impl Read, bytes: &mut [u8], field: &str) -> Result<()> {
    input.read_exact(bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => truncated(field, "became shorter while it was read"),
        kind => file_error(
            ErrorKind::Io(kind),
            field,
            format!("cannot read the file: {error}"),
        ),
    })
}

fn file_error(kind: ErrorKind, field: impl std::fmt::Display, message: String) -> Error {
    Error::Gguf(samite_gguf::Error::new(kind, field, message))
}

fn corrupt(field: impl std::fmt::Display, message: String) -> Error {
    file_error(ErrorKind::Corrupt, field, message)
}

fn truncated(field: &str, message: impl std::fmt::Display) -> Error {
    let message = format!("{message}: it is truncated; {WRITE_AGAIN}");
    file_error(ErrorKind::Truncated, field, message)
}

fn not_log_probs() -> Error {
    corrupt(
        "magic",
        "is not '_logits_': this is no file of log-probabilities; name one that \
         'samite perplexity --kl-divergence-base FILE' wrote"
            .to_owned(),
    )
}

fn cannot_write(error: &std::io::Error) -> Error {
    let message = format!("cannot write the file: {error}");
    file_error(ErrorKind::Io(error.kind()), "", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perplexity::Scored;

    const N_CTX: usize = 6;
    const N_VOCAB: usize = 5;
    /// The last chunk has different tokens, so that an offset by a chunk would show.
    const TOKENS: [u32; 12] = [0, 1, 2, 3, 4, 0, 4, 3, 2, 1, 0, 4];

    /// Logits of a row, the last one far below the others.
    fn logits(row: usize) -> [f32; N_VOCAB] {
        [0.5, 2.0, -1.25, 3.0 - row as f32, -40.0]
    }

    fn example() -> Vec<u8> {
        let mut writer = LogProbsWriter::new(Vec::new(), N_CTX, N_VOCAB, &TOKENS).unwrap();
        for row in 0..4 {
            let logits = logits(row);
            let scored = Scored::new(&logits, 0, 0);
            writer
                .write_row(&logits, scored.max, scored.log_sum_exp)
                .unwrap();
        }
        writer.finish().unwrap()
    }

    fn reader(bytes: &[u8]) -> Result<LogProbsReader<&[u8]>> {
        LogProbsReader::new(bytes, bytes.len() as u64)
    }

    /// Reads a whole file and returns the message if it is rejected.
    fn refused(bytes: &[u8]) -> Option<String> {
        let read = || {
            let mut reader = reader(bytes)?;
            (0..4).try_for_each(|_| reader.next_row().map(|_| ()))
        };
        read().err().map(|error: Error| error.to_string())
    }

    #[test]
    fn log_probability_files_round_trip() {
        let bytes = example();
        // 12 tokens, and 4 rows of 5 codes, padded to 6.
        assert_eq!(bytes.len(), 20 + 12 * 4 + 4 * (8 + 6 * 2));
        assert_eq!(bytes[..20], *b"_logits_\x06\0\0\0\x05\0\0\0\x02\0\0\0");
        let mut reader = reader(&bytes).unwrap();
        assert_eq!((reader.n_ctx(), reader.n_vocab()), (N_CTX, N_VOCAB));
        assert_eq!((reader.n_chunk(), reader.tokens()), (2, &TOKENS[..]));
        for row in 0..4 {
            let logits = logits(row);
            let read = reader.next_row().unwrap();
            assert_eq!(read.codes.len(), N_VOCAB);
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            for (token, (&code, &logit)) in read.codes.iter().zip(&logits).enumerate() {
                let nats = Scored::new(&logits, 0, token as u32).nats;
                // Values further below the top are raised.
                let expected = -nats + f64::from((max - MAX_RANGE - logit).max(0.0));
                let half = f64::from(read.scale) / 2.0;
                let error = (read.log_prob(code) - expected).abs();
                assert!(error <= half + 4e-6, "{row} {token}: {error}");
            }
        }
        let error = reader.next_row().unwrap_err().to_string();
        assert!(error.contains("all rows"), "{error}");
    }

    #[test]
    fn codes_of_known_logits() {
        let mut codes = [7; 6];
        // Multiples of the scale, which is 2^-12.
        let logits = [0.0, -65535.0 / 4096.0, -1.0, -0.25];
        let [scale, minimum] = encode(&logits, 0.0, 0.5, &mut codes);
        assert_eq!(scale, 1.0 / 4096.0);
        assert_eq!(minimum, logits[1] - 0.5);
        assert_eq!(codes, [65535, 0, 61439, 64511, 0, 0]);
        // A token that cannot occur does not stretch the scale.
        let [scale, minimum] = encode(&[1.0, f32::NEG_INFINITY], 1.0, 0.0, &mut codes);
        assert_eq!((scale, minimum), (16.0 / 65535.0, -16.0));
        assert_eq!(codes[..2], [65535, 0]);
        // All tokens are equally likely.
        let [scale, minimum] = encode(&[3.0; 4], 3.0, 4f64.ln(), &mut codes);
        assert_eq!((scale, minimum), (0.0, -(4f32.ln())));
        assert_eq!(codes, [0; 6]);
    }

    /// llama.cpp rounds by adding 1.5 * 2^23, which leaves the integer in the mantissa.
    #[test]
    fn codes_are_rounded_as_in_llama_cpp() {
        let logits: Vec<f32> = (0..4001).map(|i| 7.0 - i as f32 * 0.003_907).collect();
        let mut codes = vec![0; logits.len()];
        let [scale, _] = encode(&logits, 7.0, 3.0, &mut codes);
        let min = logits[4000].max(7.0 - 16.0);
        for (&logit, &code) in logits.iter().zip(&codes) {
            let shifted = 1.0 / scale * (logit - min).max(0.0) + 12_582_912.0;
            let expected = (shifted.to_bits() & 0x7f_ffff) as i32 - 0x40_0000;
            assert_eq!(i32::from(code), expected, "{logit}");
        }
    }

    #[test]
    fn truncated_files_are_refused() {
        let bytes = example();
        assert_eq!(refused(&bytes), None);
        for length in 0..bytes.len() {
            let message = refused(&bytes[..length]).unwrap();
            let part = if length < 8 { "magic" } else { "truncated" };
            assert!(message.contains(part), "{length}: {message}");
            // The file becomes shorter after its length was taken.
            let shrunk = LogProbsReader::new(&bytes[..length], bytes.len() as u64);
            let rows = shrunk
                .and_then(|mut reader| (0..4).try_for_each(|_| reader.next_row().map(|_| ())));
            let message = rows.unwrap_err().to_string();
            assert!(message.contains("became shorter"), "{length}: {message}");
        }
        let message = refused(&[&bytes[..], &[0]].concat()).unwrap();
        assert!(
            message.contains("make 148 bytes, but the file has 149"),
            "{message}"
        );
    }

    #[test]
    fn hostile_numbers_are_refused() {
        let with = |at: usize, number: u32| {
            let mut bytes = example();
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
            refused(&bytes).unwrap_or_default()
        };
        let row = 20 + 12 * 4;
        for (at, number, part) in [
            (0, 0, "magic: is not '_logits_'"),
            (8, 0, "n_ctx: is 0, must be at least 4"),
            (8, 3, "n_ctx: is 3"),
            (8, u32::MAX, "n_ctx: is -1"),
            (8, i32::MAX as u32, "n_ctx 2147483647"),
            (12, 0, "n_vocab: is 0, must be at least 1"),
            (12, 1 << 31, "n_vocab: is -2147483648"),
            (12, i32::MAX as u32, "n_vocab 2147483647"),
            (16, 0, "n_chunk: is 0, must be at least 1"),
            (16, i32::MAX as u32, "but the file has 148: it is truncated"),
            (16, 1, "but the file has 148: it is damaged"),
            (
                20 + 7 * 4,
                5,
                "token 1 of chunk 2: is 5, but the vocabulary has 5",
            ),
            (20, u32::MAX, "token 0 of chunk 1: is -1"),
            (row, f32::NAN.to_bits(), "row 0 of chunk 1: scale NaN"),
            (row, (-1f32).to_bits(), "scale -1"),
            (row, 1f32.to_bits(), "scale 1"),
            (
                row + 3 * 20 + 4,
                f32::INFINITY.to_bits(),
                "row 1 of chunk 2",
            ),
        ] {
            let message = with(at, number);
            assert!(message.contains(part), "no {part:?} in: {message}");
            assert!(
                message.contains("write the file again") || at == 0,
                "{message}"
            );
        }
        // All extents at once: the product overflows 64 bits.
        let mut bytes = example();
        for at in [8, 12, 16] {
            bytes[at..at + 4].copy_from_slice(&i32::MAX.to_le_bytes());
        }
        let message = refused(&bytes).unwrap();
        assert!(message.contains("larger than any"), "{message}");
        let bytes = example();
        let reader = reader(&bytes).unwrap();
        reader.check_vocab(5).unwrap();
        let message = reader.check_vocab(6).unwrap_err().to_string();
        assert!(message.starts_with("n_vocab: is 5"), "{message}");
    }

    #[test]
    fn damaged_bytes_never_panic() {
        let bytes = example();
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                let _ = refused(&damaged);
            }
        }
    }

    #[test]
    fn writers_refuse_invalid_sizes_and_incomplete_rows() {
        for (n_ctx, n_vocab, tokens) in [
            (0, 5, &TOKENS[..]),
            (3, 5, &TOKENS[..]),
            (4, 0, &TOKENS[..]),
            (5, 5, &TOKENS[..]),
            (4, 5, &[]),
            (4, 1 << 31, &TOKENS[..]),
        ] {
            let writer = LogProbsWriter::new(Vec::new(), n_ctx, n_vocab, tokens);
            assert!(matches!(writer, Err(Error::InvalidArgument(_))), "{n_ctx}");
        }
        let mut writer = LogProbsWriter::new(Vec::new(), N_CTX, N_VOCAB, &TOKENS).unwrap();
        assert!(writer.write_row(&[0.0; 4], 0.0, 4f64.ln()).is_err());
        writer.write_row(&[0.0; 5], 0.0, 5f64.ln()).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.starts_with("3 rows"), "{error}");
    }

    #[test]
    fn a_full_disk_is_an_error_of_the_file() {
        let mut space = [0; 100];
        let mut writer = LogProbsWriter::new(&mut space[..], N_CTX, N_VOCAB, &TOKENS).unwrap();
        let mut write = || writer.write_row(&logits(0), 3.0, 1.0);
        write().unwrap();
        assert!(matches!(write(), Err(Error::Gguf(_))));
    }
}
