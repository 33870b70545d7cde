//! Importance matrices: the importance of each column of a model's matrices, so that quantization
//! preserves the most important ones best.
//!
//! The importance of a column is the magnitude of its input. For each weight, the matrix contains
//! the mean square of the input of each column while the model processes sample texts. Weights that
//! are matrices of experts have such a row for each expert.
//!
//! Files are those of `llama-imatrix`: GGUF with sums and counts, and the older `.dat`, which can
//! only be read.

mod collect;
mod file;

pub use collect::collect;

use samite_gguf::{Error, ErrorKind, Metadata};
use std::collections::BTreeMap;

/// Statistics of one weight's input.
#[derive(Clone, Debug, Default, PartialEq)]
struct InputStatistics {
    /// Sums of squares by column. The sums of several matrices follow each other.
    sums: Vec<f64>,
    /// Number of summed rows by matrix, or one number for all matrices.
    counts: Vec<u64>,
}

impl InputStatistics {
    /// Allocates an empty entry with these sizes, or checks the sizes of an existing one.
    fn of_size(&mut self, weight: &str, sums: usize, counts: usize) -> Result<(), String> {
        if self.counts.is_empty() {
            (self.sums, self.counts) = (vec![0.0; sums], vec![0; counts]);
        }
        // Older files have one count for all experts.
        if let [count] = *self.counts {
            self.counts = vec![count; counts];
        }
        if self.sums.len() != sums || self.counts.len() != counts {
            return Err(format!(
                "'{weight}' has {sums} columns in all for {counts} matrices, and the importance matrix {} for {}: it is of another model",
                self.sums.len(),
                self.counts.len()
            ));
        }
        Ok(())
    }

    /// Returns the number of experts without rows, and of all experts.
    fn unseen(&self) -> (usize, usize) {
        (
            self.counts.iter().filter(|&&count| count == 0).count(),
            self.counts.len(),
        )
    }

    /// Returns the importance of the columns: 1 for all columns of an expert without rows.
    fn importance(&self) -> Vec<f32> {
        let columns = self.sums.len() / self.counts.len().max(1);
        let of_part = |(sums, &count): (&[f64], &u64)| -> Vec<f32> {
            // In single precision like llama.cpp, so that files are identical.
            let mean = |sum: &f64| {
                if count == 0 {
                    1.0
                } else {
                    *sum as f32 / count as f32
                }
            };
            sums.iter().map(mean).collect()
        };
        let parts = self.sums.chunks(columns.max(1)).zip(&self.counts);
        parts.flat_map(of_part).collect()
    }
}

/// Importance of the columns of a model's weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    entries: BTreeMap<String, InputStatistics>,
    datasets: Vec<String>,
    chunks: u64,
    /// Tokens of a chunk. Unknown in files of the older format, which count chunks instead of rows.
    chunk_size: Option<u32>,
    /// File that the matrix was read from.
    file: Option<String>,
}

impl ImportanceMatrix {
    /// Creates an empty matrix, for texts in chunks of `chunk_size` tokens.
    pub fn new(chunk_size: u32) -> Self {
        ImportanceMatrix {
            chunk_size: Some(chunk_size),
            ..Self::default()
        }
    }

    fn checked(self) -> Result<Self, Error> {
        if self.entries.is_empty() {
            return Err(corrupt("", "has no importance of any weight"));
        }
        for (weight, entry) in &self.entries {
            let field = || field(weight);
            let parts = entry.counts.len();
            if parts == 0 || entry.sums.is_empty() || !entry.sums.len().is_multiple_of(parts) {
                let message = format!("has {} columns in {parts} parts", entry.sums.len());
                return Err(corrupt(field(), &message));
            }
            if let Some(sum) = entry
                .sums
                .iter()
                .find(|sum| !(sum.is_finite() && **sum >= 0.0))
            {
                return Err(corrupt(field(), &format!("has the sum {sum}")));
            }
        }
        Ok(self)
    }

    /// Creates a matrix from importances, in the format of [`importance`](Self::importance).
    pub fn of_importance(
        weights: impl IntoIterator<Item = (String, Vec<f32>)>,
    ) -> Result<Self, Error> {
        let entries = weights.into_iter().map(|(weight, importance)| {
            let sums = importance.into_iter().map(f64::from).collect();
            (
                weight,
                InputStatistics {
                    sums,
                    counts: vec![1],
                },
            )
        });
        let matrix = ImportanceMatrix {
            entries: entries.collect(),
            ..Self::default()
        };
        matrix.checked()
    }

    /// Records in a model's metadata which matrix it was quantized with, under llama.cpp's keys.
    pub(crate) fn describe(&self, metadata: &mut Metadata) -> Result<(), Error> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        metadata.set("quantize.imatrix.file", file.as_str())?;
        if let Some(name) = self.datasets.first() {
            metadata.set("quantize.imatrix.dataset", name.as_str())?;
        }
        let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        metadata.set(
            "quantize.imatrix.entries_count",
            number(self.entries.len() as u64),
        )?;
        if self.chunks > 0 {
            metadata.set("quantize.imatrix.chunks_count", number(self.chunks))?;
        }
        Ok(())
    }

    /// Adds the statistics of another matrix of the same model.
    ///
    /// # Errors
    /// Returns an error if the weights have other sizes.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        let scale = match (other.chunk_size, self.chunk_size) {
            // The older format has means of rows, times the number of chunks.
            (None, Some(chunk_size)) => u64::from(chunk_size).max(1),
            _ => 1,
        };
        for (weight, seen) in &other.entries {
            let entry = self.entries.entry(weight.clone()).or_default();
            // One count for all experts, or one for each expert.
            let counts = seen.counts.len().max(entry.counts.len());
            let mut seen = seen.clone();
            let size = seen.sums.len();
            for entry in [&mut seen, &mut *entry] {
                let sized = entry.of_size(weight, size, counts);
                sized.map_err(|message| Error::new(ErrorKind::InvalidArgument, "", message))?;
            }
            for (sum, seen) in entry.sums.iter_mut().zip(&seen.sums) {
                *sum += seen * scale as f64;
            }
            for (count, seen) in entry.counts.iter_mut().zip(&seen.counts) {
                *count = count.saturating_add(seen.saturating_mul(scale));
            }
        }
        self.datasets.extend_from_slice(&other.datasets);
        self.chunks = self.chunks.saturating_add(other.chunks);
        Ok(())
    }

    /// Records the name of a text.
    pub fn add_dataset(&mut self, name: impl Into<String>) {
        self.datasets.push(name.into());
    }

    /// Returns the names of the texts.
    pub fn datasets(&self) -> &[String] {
        &self.datasets
    }

    /// Returns the number of tokens in a chunk, which is unknown in files of the older format.
    pub fn chunk_size(&self) -> Option<u32> {
        self.chunk_size
    }

    /// Returns the number of chunks that were processed.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Returns the names of the weights.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Keeps only the weights for which `keeps` returns true.
    pub fn retain(&mut self, mut keeps: impl FnMut(&str) -> bool) {
        self.entries.retain(|weight, _| keeps(weight));
    }

    /// Returns the weights with experts that never had a row: name, number of these experts, and
    /// number of all experts.
    pub fn unseen_experts(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let unseen = self
            .entries
            .iter()
            .map(|(weight, entry)| (&**weight, entry.unseen()));
        unseen
            .filter(|(_, (none, _))| *none > 0)
            .map(|(weight, (none, all))| (weight, none, all))
    }

    /// Returns the importance of a weight's columns, one matrix after the other, or `None` if it is
    /// unknown.
    pub fn importance(&self, weight: &str) -> Option<Vec<f32>> {
        self.entries.get(weight).map(InputStatistics::importance)
    }
}

fn field(weight: &str) -> String {
    // Names in GGUF files have at most 64 bytes, and those of the older format are no longer.
    format!("importance of \"{}\"", weight.escape_debug())
}

fn corrupt(field: impl std::fmt::Display, message: &str) -> Error {
    Error::new(ErrorKind::Corrupt, field, message)
}
