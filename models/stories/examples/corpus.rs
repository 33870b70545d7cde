//! Prints stories, one per line.
//!
//! ```sh
//! cargo run --release -p samite-stories --example corpus -- 100000 1 > train.txt
//! ```

use std::io::{BufWriter, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let seed: u64 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    for index in 0..count {
        writeln!(out, "{}", samite_stories::story(seed, index))?;
    }
    Ok(out.flush()?)
}
