//! Importance matrices: how much each column of a model's matrices matters, so that quantization keeps best what matters most.
//!
//! A column matters as much as what is multiplied with it is large: the matrix holds, for each weight, the mean square of its input in each column
//! while the model reads sample texts. Weights that are matrices of experts have such a row for each expert.
//!
//! Files are those of `llama-imatrix`: GGUF with sums and counts, and the older `.dat`, which is only read.

mod collect;
mod file;

pub use collect::collect;

use samite_gguf::{Error, ErrorKind, Metadata};
use std::collections::BTreeMap;

/// What was seen of one weight's input.
#[derive(Clone, Debug, Default, PartialEq)]
struct Entry {
    /// Sums of squares by column; those of all columns for one matrix after the other, where there are several.
    sums: Vec<f64>,
    /// Rows that were summed, by matrix, or one number for all.
    counts: Vec<u64>,
}

impl Entry {
    /// Makes it an entry of so many numbers, if nothing was seen yet, or checks that it is one.
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

    /// Experts without any row, and all.
    fn unseen(&self) -> (usize, usize) {
        (
            self.counts.iter().filter(|&&count| count == 0).count(),
            self.counts.len(),
        )
    }

    /// How much the columns matter: 1 for all of an expert that never had a row.
    fn importance(&self) -> Vec<f32> {
        let columns = self.sums.len() / self.counts.len().max(1);
        let of_part = |(sums, &count): (&[f64], &u64)| -> Vec<f32> {
            // In single precision as llama.cpp does it, so that files become the same.
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

/// How much the columns of a model's weights matter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    entries: BTreeMap<String, Entry>,
    datasets: Vec<String>,
    chunks: u64,
    /// Tokens of a chunk. Unknown in files of the older format, which count chunks where others count rows.
    chunk_size: Option<u32>,
    /// The file that it was read from.
    file: Option<String>,
}

impl ImportanceMatrix {
    /// A matrix that has seen nothing yet, for texts in chunks of so many tokens.
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

    /// One that says how much columns matter, as [`importance`](Self::importance) does.
    pub fn of_importance(
        weights: impl IntoIterator<Item = (String, Vec<f32>)>,
    ) -> Result<Self, Error> {
        let entries = weights.into_iter().map(|(weight, importance)| {
            let sums = importance.into_iter().map(f64::from).collect();
            (
                weight,
                Entry {
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

    /// Notes in a model's file what it was quantized with, under llama.cpp's keys.
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

    /// Adds what another matrix of the same model has seen.
    ///
    /// # Errors
    /// If its weights have other sizes.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        let scale = match (other.chunk_size, self.chunk_size) {
            // The older format has means of rows, times the number of chunks.
            (None, Some(chunk_size)) => u64::from(chunk_size).max(1),
            _ => 1,
        };
        for (weight, seen) in &other.entries {
            let entry = self.entries.entry(weight.clone()).or_default();
            // One count for all experts, or one for each of them.
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

    /// Notes the name of a text that is read.
    pub fn add_dataset(&mut self, name: impl Into<String>) {
        self.datasets.push(name.into());
    }

    /// Names of the texts.
    pub fn datasets(&self) -> &[String] {
        &self.datasets
    }

    /// Tokens of a chunk; unknown in files of the older format.
    pub fn chunk_size(&self) -> Option<u32> {
        self.chunk_size
    }

    /// Chunks of text that were read.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Names of the weights.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Keeps only the weights that `keeps` says.
    pub fn retain(&mut self, mut keeps: impl FnMut(&str) -> bool) {
        self.entries.retain(|weight, _| keeps(weight));
    }

    /// Weights of which some experts never had a row: name, so many experts, of so many.
    pub fn unseen_experts(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let unseen = self
            .entries
            .iter()
            .map(|(weight, entry)| (&**weight, entry.unseen()));
        unseen
            .filter(|(_, (none, _))| *none > 0)
            .map(|(weight, (none, all))| (weight, none, all))
    }

    /// How much the columns of a weight matter: of one matrix after the other. `None` if nothing is known.
    pub fn importance(&self, weight: &str) -> Option<Vec<f32>> {
        self.entries.get(weight).map(Entry::importance)
    }
}

fn field(weight: &str) -> String {
    // Names in GGUF files have 64 bytes at most, and those of the older format no more.
    format!("importance of \"{}\"", weight.escape_debug())
}

fn corrupt(field: impl std::fmt::Display, message: &str) -> Error {
    Error::new(ErrorKind::Corrupt, field, message)
}
