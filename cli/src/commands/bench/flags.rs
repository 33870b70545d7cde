//! The flags of `samite bench`.

use super::work::BenchCase;
use crate::args::{ModelArgs, sequence_count, thread_count, token_count};
use crate::cpu_args::PoolArgs;
use crate::model_name::ModelName;
use clap::Args;
use std::path::PathBuf;

/// Flags of `samite bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  samite bench model.gguf
  samite bench -m model.gguf -p 512,2048 -n 128 -t 1,2,4
  samite bench -m model.gguf --compare ~/llama.cpp/build/bin/llama-bench")]
pub struct BenchArgs {
    #[command(flatten)]
    pub name: ModelName,
    /// Numbers of CPU threads to measure [default: all available]
    #[arg(short = 't', long, value_name = "LIST", value_delimiter = ',',
        value_parser = thread_count)]
    pub threads: Vec<usize>,
    /// Prompt lengths to measure; 0 for none
    #[arg(short = 'p', long, value_name = "LIST", value_delimiter = ',', default_value = "512",
        value_parser = token_count)]
    pub n_prompt: Vec<usize>,
    /// Numbers of generated tokens to measure; 0 for none, as for encoders
    #[arg(short = 'n', long, value_name = "LIST", value_delimiter = ',', default_value = "64",
        value_parser = token_count)]
    pub n_gen: Vec<usize>,
    /// Numbers of tokens in the context before each measurement
    #[arg(short = 'd', long, value_name = "LIST", value_delimiter = ',', default_value = "0",
        value_parser = token_count)]
    pub depth: Vec<usize>,
    /// Numbers of sequences to generate together; prompts are measured with one
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1",
        value_parser = sequence_count)]
    pub sequences: Vec<usize>,
    /// Number of repetitions [default: 5]. With --compare, the number for each sample, whose median
    /// is used [default: 1]
    #[arg(short = 'r', long, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: Option<u32>,
    /// Compare with llama.cpp: path of its llama-bench (llama-batched-bench is expected in the same
    /// folder). Use `taskset` to choose the processors of both
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["cpu_mask", "cpu_range", "cpu_strict", "prio", "poll"])]
    pub compare: Option<PathBuf>,
    /// Number of pairs of samples in a comparison
    #[arg(long, value_name = "N", default_value = "12",
        value_parser = clap::value_parser!(u32).range(1..=1000), requires = "compare")]
    pub pairs: u32,
    /// Do not measure the machine's limits; otherwise, a comparison measures them before and after
    /// the pairs of each test, and uses the larger ones
    #[arg(long)]
    pub no_peaks: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pool: PoolArgs,
}

impl BenchArgs {
    /// Returns all combinations, prompts first.
    pub fn works(&self) -> Vec<BenchCase> {
        let mut works = Vec::new();
        let once = [1];
        for (is_prompt, counts, sequences) in [
            (true, &self.n_prompt, once.as_slice()),
            (false, &self.n_gen, &self.sequences),
        ] {
            for &tokens in counts.iter().filter(|&&tokens| tokens > 0) {
                for &depth in &self.depth {
                    works.extend(sequences.iter().map(|&sequences| BenchCase {
                        is_prompt,
                        tokens,
                        depth,
                        sequences,
                    }));
                }
            }
        }
        works
    }
}
