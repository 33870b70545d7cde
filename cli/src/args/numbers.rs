//! Parsers of numbers in flags.

/// Parses a number of CPU threads.
pub fn thread_count(text: &str) -> Result<usize, String> {
    number(text, 1, 1024)
}

/// Parses a capacity in tokens.
pub fn size(text: &str) -> Result<usize, String> {
    number(text, 1, MAX_TOKENS)
}

/// Parses a number of tokens, which may be 0.
pub fn token_count(text: &str) -> Result<usize, String> {
    number(text, 0, MAX_TOKENS)
}

/// Parses a number of sequences.
pub fn sequence_count(text: &str) -> Result<usize, String> {
    number(text, 1, 4096)
}

/// Parses a number. `all`, or llama.cpp's -1, means as many as there are.
pub fn number_or_all(text: &str) -> Result<usize, String> {
    match text {
        "all" | "-1" => Ok(usize::MAX),
        text => text
            .parse()
            .map_err(|_| "must be a number, or 'all'".to_owned()),
    }
}

/// Positions are 32-bit numbers.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Parses a number between two limits.
pub fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("must be a number from {least} to {most}")),
    }
}
